// The first half of attend and attend_mla: each workgroup takes the queries of a few rows that share a head
// of K and of V over one part of the tokens that they see, and leaves an open softmax: the largest logit,
// the sum of exponentials, and the weighted sum of values. merge.wgsl closes them.
//
// A tile of keys, then of values, is brought to workgroup memory as f32, once for all queries. Logits of a
// tile are computed from there, the running softmax is corrected, and values are added in registers.
//
// args: parameters by the names below, then records of tasks, runs and rows, and lists of tokens, all placed
// by kernels/attend/records.rs.

@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;
@group(0) @binding(3) var<storage, read> key_scales: array<u32>;
@group(0) @binding(4) var<storage, read> value_scales: array<u32>;
@group(0) @binding(5) var<storage, read> queries: array<u32>;
@group(0) @binding(6) var<storage, read> latents: array<u32>;
@group(0) @binding(7) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(8) var<storage, read_write> parts: array<f32>;

override KIND: u32;
override QUERY: u32;
override LATENT_KIND: u32;
override K_DIM: u32;
override V_DIM: u32;
// Elements that share a scale of integer formats.
override PER_SCALE: u32;
override BLOCK: u32;
// Query heads of a workgroup, its queries (rows times heads), and tokens of a tile.
override HEADS: u32;
override QUERIES: u32;
override TOKENS: u32;
// Pairs that are rotated; 0 if queries come rotated.
override PAIRS: u32;
// What indices of pairs are divided by.
override PAIRS_OR_ONE: u32 = max(PAIRS, 1u);
override INTERLEAVED: bool;
override UNROTATED: bool;
override LATENT: bool;

const THREADS: u32 = 128u;
// Below every logit.
const LOWEST: f32 = -3.4028234e38;

// Parameters.
const TASKS: u32 = 0u;
const UNITS: u32 = 1u;
const ALL_HEADS: u32 = 2u;
const K_HEADS: u32 = 3u;
const V_HEADS: u32 = 4u;
const SCALE: u32 = 5u;
const SOFTCAP: u32 = 6u;
const FACTOR: u32 = 7u;
const FIRST_ANGLE: u32 = 8u;
// Offset, stride of a row, stride of a head.
const Q_AT: u32 = 9u;
const LATENT_AT: u32 = 12u;
// Offset, stride of a block, of a token, of a head.
const K_AT: u32 = 15u;
const V_AT: u32 = 19u;
const K_SCALES_AT: u32 = 23u;
const V_SCALES_AT: u32 = 27u;
const HEADER: u32 = 31u;

// A task: first row, rows, first run, runs, place of its first part.
const TASK_WORDS: u32 = 5u;
// A run: list of tokens, 1 if the list has tokens and 0 if blocks, first and last token, factor of its
// logits, position of its first key if keys lie unrotated; then for each row that a workgroup may have:
// first token, end, position that its query is turned by.
const RUN_WORDS: u32 = 6u;
const ROW_WORDS: u32 = 3u;

// One more than the row, so that the same element of many rows lies in many banks.
override K_ROW: u32 = K_DIM + 1u;
override V_ROW: u32 = V_DIM + 1u;
override TILE_ROW: u32;
// The width of latents, or 1.
override LATENT_DIM: u32;

var<workgroup> query: array<f32, QUERIES * K_DIM>;
var<workgroup> latent: array<f32, QUERIES * LATENT_DIM>;
var<workgroup> tile: array<f32, TOKENS * TILE_ROW>;
var<workgroup> weight: array<f32, QUERIES * TOKENS>;
var<workgroup> most: array<f32, QUERIES>;
var<workgroup> total: array<f32, QUERIES>;
var<workgroup> shrink: array<f32, QUERIES>;

struct Task {
    rows: u32,
    head: u32,
    k_head: u32,
    v_head: u32,
}

// Place of a token of a run among the blocks: its block, and its token there.
fn place_of(run: u32, token: u32) -> vec2<u32> {
    let list = args[run];
    if (args[run + 1u] == 1u) {
        let slot = args[list + 2u * token];
        return vec2<u32>(slot / BLOCK, slot % BLOCK);
    }
    return vec2<u32>(args[list + token / BLOCK], token % BLOCK);
}

fn row_at(plane: u32, place: vec2<u32>, head: u32) -> u32 {
    return args[plane] + place.x * args[plane + 1u] + place.y * args[plane + 2u] + head * args[plane + 3u];
}

// Keys and values differ in their buffers and places only: `side` is known at every call.
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

// What an element of a row is multiplied by; the row's scales begin at `at`.
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

// Brings a tile of keys or of values.
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

// Both elements of a pair turned by the angle of a position.
fn turned(a: f32, b: f32, position: i32, pair: u32) -> vec2<f32> {
    let angle = angles[(u32(abs(position)) - args[FIRST_ANGLE]) * PAIRS + pair];
    let sine = select(angle.y, -angle.y, position < 0);
    return vec2<f32>(a * angle.x - b * sine, a * sine + b * angle.x) * bitcast<f32>(args[FACTOR]);
}

// The elements of a pair.
fn pair_of(pair: u32) -> vec2<u32> {
    return select(vec2<u32>(pair, pair + PAIRS), vec2<u32>(2u * pair, 2u * pair + 1u), INTERLEAVED);
}

fn turn_keys(run: u32, start: u32, end: u32, thread: u32) {
    for (var i = thread; i < TOKENS * PAIRS; i += THREADS) {
        let t = i / PAIRS_OR_ONE;
        let pair = i % PAIRS_OR_ONE;
        if (start + t < end) {
            var token = start + t;
            if (args[run + 1u] == 1u) {
                token = args[args[run] + 2u * token + 1u];
            }
            let place = t * K_ROW + pair_of(pair);
            let both = turned(tile[place.x], tile[place.y], bitcast<i32>(args[run + 5u] + token), pair);
            tile[place.x] = both.x;
            tile[place.y] = both.y;
        }
    }
}

fn load_queries(task: Task, first: u32, thread: u32) {
    let lanes = 32u / bits_of(QUERY);
    for (var i = thread; i < QUERIES * K_DIM; i += THREADS) {
        let q = i / K_DIM;
        var x = 0.0;
        if (q / HEADS < task.rows) {
            let row = first + q / HEADS;
            let head = task.head + q % HEADS;
            let at = args[Q_AT] + row * args[Q_AT + 1u] + head * args[Q_AT + 2u] + i % K_DIM;
            x = decode(QUERY, queries[at / lanes], at % lanes);
        }
        query[i] = x;
    }
    if (LATENT) {
        let latent_lanes = 32u / bits_of(LATENT_KIND);
        for (var i = thread; i < QUERIES * V_DIM; i += THREADS) {
            let q = i / V_DIM;
            var x = 0.0;
            if (q / HEADS < task.rows) {
                let row = first + q / HEADS;
                let head = task.head + q % HEADS;
                let at = args[LATENT_AT] + row * args[LATENT_AT + 1u] + head * args[LATENT_AT + 2u] + i % V_DIM;
                x = decode(LATENT_KIND, latents[at / latent_lanes], at % latent_lanes);
            }
            latent[i] = x;
        }
    }
}

fn turn_queries(task: Task, run: u32, thread: u32) {
    for (var i = thread; i < QUERIES * PAIRS; i += THREADS) {
        let q = i / PAIRS_OR_ONE;
        let pair = i % PAIRS_OR_ONE;
        if (q / HEADS < task.rows) {
            let position = bitcast<i32>(args[run + RUN_WORDS + ROW_WORDS * (q / HEADS) + 2u]);
            let place = q * K_DIM + pair_of(pair);
            let both = turned(query[place.x], query[place.y], position, pair);
            query[place.x] = both.x;
            query[place.y] = both.y;
        }
    }
}

// Logits of a tile without the part of latents.
fn multiply_keys(thread: u32) {
    for (var i = thread; i < QUERIES * TOKENS; i += THREADS) {
        let q = i / TOKENS * K_DIM;
        let k = i % TOKENS * K_ROW;
        var sum = 0.0;
        for (var d = 0u; d < K_DIM; d++) {
            sum += query[q + d] * tile[k + d];
        }
        weight[i] = sum;
    }
}

fn multiply_latents(thread: u32) {
    for (var i = thread; i < QUERIES * TOKENS; i += THREADS) {
        let q = i / TOKENS * V_DIM;
        let v = i % TOKENS * V_ROW;
        var sum = 0.0;
        for (var d = 0u; d < V_DIM; d++) {
            sum += latent[q + d] * tile[v + d];
        }
        weight[i] += sum;
    }
}

// tanh of large numbers is an overflow on some devices.
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

// Exponentials of a tile's logits, and what was summed before in terms of the new largest logit. One thread
// a query.
fn soften(task: Task, run: u32, start: u32, thread: u32) {
    let scale = bitcast<f32>(args[SCALE]) * bitcast<f32>(args[run + 4u]);
    let cap = bitcast<f32>(args[SOFTCAP]);
    for (var q = thread; q < QUERIES; q += THREADS) {
        let row = run + RUN_WORDS + ROW_WORDS * (q / HEADS);
        var first = 0u;
        var end = 0u;
        if (q / HEADS < task.rows) {
            first = max(args[row], start) - start;
            end = min(max(args[row + 1u], start) - start, TOKENS);
        }
        let before = most[q];
        var high = before;
        for (var t = first; t < end; t++) {
            var x = weight[q * TOKENS + t] * scale;
            if (cap > 0.0) {
                x = capped(x, cap);
            }
            weight[q * TOKENS + t] = x;
            if (x > high) {
                high = x;
            }
        }
        var sum = 0.0;
        for (var t = 0u; t < TOKENS; t++) {
            var x = 0.0;
            if (t >= first && t < end) {
                let logit = weight[q * TOKENS + t];
                x = exp(logit - high);
                if (is_nan_bits(bitcast<u32>(logit) & 0x7fffffffu)) {
                    x = logit;
                }
                sum += x;
            }
            weight[q * TOKENS + t] = x;
        }
        let less = exp(before - high);
        most[q] = high;
        shrink[q] = less;
        total[q] = total[q] * less + sum;
    }
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = linear(group, groups);
    let units = args[UNITS];
    if (number / units >= args[TASKS]) {
        return;
    }
    let record = HEADER + TASK_WORDS * (number / units);
    let first_row = args[record];
    let head = number % units * HEADS;
    let all_heads = args[ALL_HEADS];
    let task = Task(
        args[record + 1u],
        head,
        head * args[K_HEADS] / all_heads,
        head * args[V_HEADS] / all_heads,
    );
    var sums: array<f32, SUMS>;
    for (var i = 0u; i < SUMS; i++) {
        sums[i] = 0.0;
    }
    for (var q = thread; q < QUERIES; q += THREADS) {
        most[q] = LOWEST;
        total[q] = 0.0;
    }
    var run = args[record + 2u];
    for (var r = 0u; r < args[record + 3u]; r++) {
        workgroupBarrier();
        load_queries(task, first_row, thread);
        workgroupBarrier();
        if (PAIRS > 0u) {
            turn_queries(task, run, thread);
        }
        let end = args[run + 3u];
        for (var start = args[run + 2u]; start < end; start += TOKENS) {
            load_tile(KEYS, run, start, end, task.k_head, thread);
            workgroupBarrier();
            if (UNROTATED) {
                turn_keys(run, start, end, thread);
                workgroupBarrier();
            }
            multiply_keys(thread);
            workgroupBarrier();
            load_tile(VALUES, run, start, end, task.v_head, thread);
            workgroupBarrier();
            if (LATENT) {
                multiply_latents(thread);
                workgroupBarrier();
            }
            soften(task, run, start, thread);
            workgroupBarrier();
            for (var i = 0u; i < SUMS; i++) {
                let at = thread + i * THREADS;
                if (at < QUERIES * V_DIM) {
                    let q = at / V_DIM;
                    var sum = sums[i] * shrink[q];
                    for (var t = 0u; t < TOKENS; t++) {
                        // What a query does not see may be anything, NaN too. (As bits, since NaN is
                        // neither equal to 0 nor unequal on some devices.)
                        let w = weight[q * TOKENS + t];
                        if (bitcast<u32>(w) != 0u) {
                            sum += w * tile[t * V_ROW + at % V_DIM];
                        }
                    }
                    sums[i] = sum;
                }
            }
            workgroupBarrier();
        }
        run += RUN_WORDS + ROW_WORDS * (QUERIES / HEADS);
    }
    // A part of a row and head: largest logit, sum, values.
    for (var i = 0u; i < SUMS; i++) {
        let at = thread + i * THREADS;
        let q = at / V_DIM;
        if (at < QUERIES * V_DIM && q / HEADS < task.rows) {
            let place = (args[record + 4u] + q / HEADS * all_heads + head + q % HEADS) * (V_DIM + 2u);
            parts[place + 2u + at % V_DIM] = sums[i];
        }
    }
    for (var q = thread; q < QUERIES; q += THREADS) {
        if (q / HEADS < task.rows) {
            let place = (args[record + 4u] + q / HEADS * all_heads + head + q % HEADS) * (V_DIM + 2u);
            parts[place] = most[q];
            parts[place + 1u] = total[q];
        }
    }
}
