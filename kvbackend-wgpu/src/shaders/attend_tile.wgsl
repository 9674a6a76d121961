// Logits of a few rows' queries for a tile of tokens: the part that attend.wgsl and mass.wgsl share.
//
// The tile's keys and, for latents, its values are loaded into workgroup memory as f32, once for all queries.
// Queries are stored in groups of four: a thread multiplies each tile element that it reads by four queries.

@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;
@group(0) @binding(3) var<storage, read> key_scales: array<u32>;
@group(0) @binding(4) var<storage, read> value_scales: array<u32>;
@group(0) @binding(5) var<storage, read> queries: array<u32>;
@group(0) @binding(6) var<storage, read> latents: array<u32>;
@group(0) @binding(7) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(8) var<storage, read_write> parts: array<f32>;
@group(0) @binding(9) var<storage, read> records: array<u32>;

override KIND: u32;
override QUERY: u32;
override LATENT_KIND: u32;
override K_DIM: u32;
override V_DIM: u32;
// The number of elements that share a scale in integer formats.
override PER_SCALE: u32;
override BLOCK: u32;
// Per workgroup: the number of query heads, and of queries (rows times heads). Per tile: the number of
// tokens.
override HEADS: u32;
override QUERIES: u32;
override TOKENS: u32;
// The number of rotated pairs, or 0 if queries are already rotated.
override PAIRS: u32;
// The number of groups of four queries. The last group may have fewer.
override QUADS: u32 = (QUERIES + 3u) / 4u;
// The number of threads that share a logit: each multiplies every SHARES-th element. This occupies SHARES *
// QUADS * TOKENS threads, which is at most THREADS.
override SHARES: u32;
// The next two are used by attend.wgsl. The compiler needs all overrides before the arrays below.
// The number of threads along a row of values.
override WIDTH: u32;
// The number of groups of four queries that are summed at the same time: more than one if a row needs fewer
// threads.
override LAYERS: u32 = THREADS / WIDTH;
// Divisor for pair indices that is never 0.
override PAIRS_OR_ONE: u32 = max(PAIRS, 1u);
override INTERLEAVED: bool;
override UNROTATED: bool;
override LATENT: bool;

const THREADS: u32 = 128u;
// A number below every logit.
const LOWEST: f32 = -3.4028234e38;

// Indices of the parameters in args.
const TASKS: u32 = 0u;
const UNITS: u32 = 1u;
const ALL_HEADS: u32 = 2u;
const K_HEADS: u32 = 3u;
const V_HEADS: u32 = 4u;
const SCALE: u32 = 5u;
const SOFTCAP: u32 = 6u;
const FACTOR: u32 = 7u;
const FIRST_ANGLE: u32 = 8u;
// Parameters of rows: offset, stride of a row, stride of a head.
const Q_AT: u32 = 9u;
const LATENT_AT: u32 = 12u;
// Parameters of planes: offset, and strides of a block, of a token and of a head.
const K_AT: u32 = 15u;
const V_AT: u32 = 19u;
const K_SCALES_AT: u32 = 23u;
const V_SCALES_AT: u32 = 27u;

// A task: first row, number of rows, first run, number of runs, index of its first part.
const TASK_WORDS: u32 = 5u;
// A run: offset of its token list, 1 for a list of slots or 0 for a list of blocks, first token, end of its
// tokens, factor for its logits, position of its first key if keys are stored unrotated; then for each row
// that a workgroup may have: first token, end, position by which its query is rotated.
const RUN_WORDS: u32 = 6u;
const ROW_WORDS: u32 = 3u;

// One more than the row's length, so that the same element of many rows is in different memory banks.
override K_ROW: u32 = K_DIM + 1u;
override V_ROW: u32 = V_DIM + 1u;
override TILE_ROW: u32;
// The width of latents, or 1 if there are none.
override LATENT_DIM: u32;

// Indexed by group of four queries and by element.
var<workgroup> query: array<vec4<f32>, QUADS * K_DIM>;
var<workgroup> latent: array<vec4<f32>, QUADS * LATENT_DIM>;
var<workgroup> tile: array<f32, TOKENS * TILE_ROW>;
// The logits, later their exponentials. Indexed by share, then by group of four queries, then by token.
var<workgroup> weight: array<vec4<f32>, SHARES * QUADS * TOKENS>;

struct Task {
    rows: u32,
    head: u32,
    k_head: u32,
    v_head: u32,
}

// Returns the location of a run's token: its block, and its index within the block.
fn place_of(run: u32, token: u32) -> vec2<u32> {
    let list = records[run];
    if (records[run + 1u] == 1u) {
        let slot = records[list + 2u * token];
        return vec2<u32>(slot / BLOCK, slot % BLOCK);
    }
    return vec2<u32>(records[list + token / BLOCK], token % BLOCK);
}

fn row_at(plane: u32, place: vec2<u32>, head: u32) -> u32 {
    return args[plane] + place.x * args[plane + 1u] + place.y * args[plane + 2u] + head * args[plane + 3u];
}

// Keys and values differ only in their buffers and offsets. `side` is a constant at every call.
const KEYS: u32 = 0u;
const VALUES: u32 = 1u;

fn code_word(side: u32, word: u32) -> u32 {
    if (side == KEYS) {
        return keys[word];
    }
    return values[word];
}

fn scale_word(side: u32, word: u32) -> u32 {
    if (side == KEYS) {
        return key_scales[word];
    }
    return value_scales[word];
}

// Returns the scale of an element in a row whose scales start at index `at`.
fn scale_of(side: u32, at: u32, element: u32) -> f32 {
    switch (KIND) {
        case E4M3, E5M2: { return bitcast<f32>(scale_word(side, at)); }
        case I8, I4: {
            let scale = at + element / PER_SCALE;
            return f16_of(scale_word(side, scale / 2u), scale % 2u);
        }
        default: { return 1.0; }
    }
}

// Loads a tile of keys or of values into workgroup memory.
fn load_tile(side: u32, run: u32, start: u32, end: u32, head: u32, thread: u32) {
    let dim = select(K_DIM, V_DIM, side == VALUES);
    let row = select(K_ROW, V_ROW, side == VALUES);
    let lanes = 32u / bits_of(KIND);
    let words = (dim + lanes - 2u) / lanes + 1u;
    for (var i = thread; i < TOKENS * words; i += THREADS) {
        let t = i / words;
        if (start + t < end) {
            let place = place_of(run, start + t);
            let at = row_at(select(K_AT, V_AT, side == VALUES), place, head);
            let scales = row_at(select(K_SCALES_AT, V_SCALES_AT, side == VALUES), place, head);
            let word = at / lanes + i % words;
            if (word * lanes < at + dim) {
                let bits = code_word(side, word);
                for (var lane = 0u; lane < lanes; lane++) {
                    let element = word * lanes + lane - at;
                    if (element < dim) {
                        tile[t * row + element] = decode(KIND, bits, lane) * scale_of(side, scales, element);
                    }
                }
            }
        }
    }
}

// Returns a pair's elements, rotated by the angle of a position.
fn turned(a: f32, b: f32, position: i32, pair: u32) -> vec2<f32> {
    let angle = angles[(u32(abs(position)) - args[FIRST_ANGLE]) * PAIRS + pair];
    let sine = select(angle.y, -angle.y, position < 0);
    return vec2<f32>(a * angle.x - b * sine, a * sine + b * angle.x) * bitcast<f32>(args[FACTOR]);
}

// Returns the indices of a pair's two elements.
fn pair_of(pair: u32) -> vec2<u32> {
    return select(vec2<u32>(pair, pair + PAIRS), vec2<u32>(2u * pair, 2u * pair + 1u), INTERLEAVED);
}

fn turn_keys(run: u32, start: u32, end: u32, thread: u32) {
    for (var i = thread; i < TOKENS * PAIRS; i += THREADS) {
        let t = i / PAIRS_OR_ONE;
        let pair = i % PAIRS_OR_ONE;
        if (start + t < end) {
            var token = start + t;
            if (records[run + 1u] == 1u) {
                token = records[records[run] + 2u * token + 1u];
            }
            let place = t * K_ROW + pair_of(pair);
            let both = turned(tile[place.x], tile[place.y], bitcast<i32>(records[run + 5u] + token), pair);
            tile[place.x] = both.x;
            tile[place.y] = both.y;
        }
    }
}

// Returns an element of the queries, or of their latent part.
fn query_element(side: u32, at: u32) -> f32 {
    if (side == KEYS) {
        let lanes = 32u / bits_of(QUERY);
        return decode(QUERY, queries[at / lanes], at % lanes);
    }
    let lanes = 32u / bits_of(LATENT_KIND);
    return decode(LATENT_KIND, latents[at / lanes], at % lanes);
}

fn load_queries(side: u32, task: Task, first: u32, thread: u32) {
    let dim = select(K_DIM, V_DIM, side == VALUES);
    let plane = select(Q_AT, LATENT_AT, side == VALUES);
    for (var i = thread; i < QUADS * dim; i += THREADS) {
        let quad = i / dim;
        let element = i % dim;
        var four = vec4<f32>();
        for (var lane = 0u; lane < 4u; lane++) {
            let q = 4u * quad + lane;
            if (q / HEADS < task.rows) {
                let row = args[plane] + (first + q / HEADS) * args[plane + 1u];
                four[lane] = query_element(side, row + (task.head + q % HEADS) * args[plane + 2u] + element);
            }
        }
        if (side == KEYS) {
            query[element * QUADS + quad] = four;
        } else {
            latent[element * QUADS + quad] = four;
        }
    }
}

fn turn_queries(task: Task, run: u32, thread: u32) {
    for (var i = thread; i < QUADS * PAIRS; i += THREADS) {
        let pair = i % PAIRS_OR_ONE;
        let place = pair_of(pair) * QUADS + i / PAIRS_OR_ONE;
        var x = query[place.x];
        var y = query[place.y];
        for (var lane = 0u; lane < 4u; lane++) {
            let row = (4u * (i / PAIRS_OR_ONE) + lane) / HEADS;
            if (row < task.rows) {
                let position = bitcast<i32>(records[run + RUN_WORDS + ROW_WORDS * row + 2u]);
                let both = turned(x[lane], y[lane], position, pair);
                x[lane] = both.x;
                y[lane] = both.y;
            }
        }
        query[place.x] = x;
        query[place.y] = y;
    }
}

// Computes each thread's share of a tile's logits: stores the products with keys, or adds the products with
// latents.
fn multiply(side: u32, thread: u32) {
    let dim = select(K_DIM, V_DIM, side == VALUES);
    let row = thread % TOKENS * select(K_ROW, V_ROW, side == VALUES);
    let quad = thread / TOKENS % QUADS;
    let share = thread / (TOKENS * QUADS);
    if (share >= SHARES) {
        return;
    }
    var sum = vec4<f32>();
    if (side == KEYS) {
        for (var d = share; d < dim; d += SHARES) {
            sum += query[d * QUADS + quad] * tile[row + d];
        }
    } else {
        sum = weight[thread];
        for (var d = share; d < dim; d += SHARES) {
            sum += latent[d * QUADS + quad] * tile[row + d];
        }
    }
    weight[thread] = sum;
}

// Returns x, softly capped at `cap`. Large values are clamped first, because their tanh overflows on some
// devices.
fn capped(x: f32, cap: f32) -> f32 {
    let y = x / cap;
    if (y > 20.0) {
        return cap;
    }
    if (y < -20.0) {
        return -cap;
    }
    return cap * tanh(y);
}

// The tokens of a tile that each of four queries sees: the first token, and the end.
struct Seen {
    first: vec4<u32>,
    end: vec4<u32>,
}

fn seen(task: Task, run: u32, start: u32, quad: u32) -> Seen {
    var tokens = Seen();
    for (var lane = 0u; lane < 4u; lane++) {
        let q = 4u * quad + lane;
        if (q / HEADS < task.rows) {
            let row = run + RUN_WORDS + ROW_WORDS * (q / HEADS);
            tokens.first[lane] = max(records[row], start) - start;
            tokens.end[lane] = max(records[row + 1u], start) - start;
        }
    }
    return tokens;
}

// Sums the shares to a tile's logits. Tokens that a query does not see get the lowest logit.
fn add_shares(tokens: Seen, run: u32, thread: u32) {
    var x = weight[thread];
    for (var share = 1u; share < SHARES; share++) {
        x += weight[thread + share * QUADS * TOKENS];
    }
    x *= bitcast<f32>(args[SCALE]) * bitcast<f32>(records[run + 4u]);
    let cap = bitcast<f32>(args[SOFTCAP]);
    if (cap > 0.0) {
        for (var lane = 0u; lane < 4u; lane++) {
            x[lane] = capped(x[lane], cap);
        }
    }
    weight[thread] = select(vec4<f32>(LOWEST), x, sees(tokens, thread % TOKENS));
}

fn sees(tokens: Seen, token: u32) -> vec4<bool> {
    let t = vec4<u32>(token);
    return (t >= tokens.first) & (t < tokens.end);
}
