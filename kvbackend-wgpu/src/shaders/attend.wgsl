// The first half of attend and attend_mla. Each workgroup handles the queries of a few rows, for heads that
// share one head of K and of V, and one part of the tokens that these rows see. The result is an unnormalised
// softmax: the largest logit, the sum of exponentials, and the weighted sum of values. merge.wgsl normalises
// it.
//
// A tile of keys, and then a tile of values, is loaded into workgroup memory as f32, once for all queries.
// Decision: docs/decisions/backend-wgpu.md#attention-processes-four-queries-at-once
// Queries are stored in groups of four: a thread multiplies each tile element that it reads by four queries,
// both for logits and for values. Registers accumulate the values.
//
// args: parameters by the names below, different for each layer.
// records: tasks, runs and rows, and lists of tokens, in the order of kernels/attend/records.rs. All layers
// of a step share them.

// The largest logit, and the factor that rescales the sums after the last tile.
var<workgroup> most: array<vec4<f32>, QUADS>;
var<workgroup> shrink: array<vec4<f32>, QUADS>;

// Returns the largest logit of each of four queries so far, including this tile.
fn highest(quad: u32) -> vec4<f32> {
    var high = most[quad];
    for (var t = 0u; t < TOKENS; t++) {
        let x = weight[quad * TOKENS + t];
        high = select(high, x, x > high);
    }
    return high;
}

// Computes the exponential of one logit per query, and the factor that rescales the earlier sums to the new
// largest logit.
fn soften(tokens: Seen, high: vec4<f32>, thread: u32) {
    let x = weight[thread];
    var e = select(vec4<f32>(), exp(x - high), sees(tokens, thread % TOKENS));
    for (var lane = 0u; lane < 4u; lane++) {
        if (is_nan_bits(bitcast<u32>(x[lane]) & 0x7fffffffu)) {
            e[lane] = x[lane];
        }
    }
    weight[thread] = e;
    if (thread % TOKENS == 0u) {
        let quad = thread / TOKENS;
        shrink[quad] = exp(most[quad] - high);
        most[quad] = high;
    }
}

// A thread's sums, for some groups of four queries: the sum of weights, and the weighted sums of some value
// columns.
var<private> totals: array<vec4<f32>, TURNS>;
var<private> sums: array<vec4<f32>, TURNS * COLUMNS>;

fn add_values(thread: u32) {
    for (var turn = 0u; turn < TURNS; turn++) {
        let less = shrink[min(thread / WIDTH + turn * LAYERS, QUADS - 1u)];
        totals[turn] *= less;
        for (var c = 0u; c < COLUMNS; c++) {
            sums[turn * COLUMNS + c] *= less;
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        for (var turn = 0u; turn < TURNS; turn++) {
            let w = weight[min(thread / WIDTH + turn * LAYERS, QUADS - 1u) * TOKENS + t];
            totals[turn] += w;
            // Values that a query does not see may be anything, even NaN, so they must be skipped. (Weights
            // are compared as bits, because NaN is neither equal nor unequal to 0 on some devices.)
            let used = bitcast<vec4<u32>>(w) != vec4<u32>();
            for (var c = 0u; c < COLUMNS; c++) {
                let value = tile[t * V_ROW + min(thread % WIDTH + c * WIDTH, V_DIM - 1u)];
                sums[turn * COLUMNS + c] += select(vec4<f32>(), w * value, used);
            }
        }
    }
}

// Writes the part of each row and head: the largest logit, the sum of weights, and the weighted sum of
// values.
fn write_parts(task: Task, first: u32, thread: u32) {
    for (var turn = 0u; turn < TURNS; turn++) {
        let quad = thread / WIDTH + turn * LAYERS;
        for (var lane = 0u; lane < 4u; lane++) {
            let q = 4u * quad + lane;
            if (quad < QUADS && q / HEADS < task.rows) {
                let place = (first + q / HEADS * args[ALL_HEADS] + task.head + q % HEADS) * (V_DIM + 2u);
                if (thread % WIDTH == 0u) {
                    parts[place] = most[quad][lane];
                    parts[place + 1u] = totals[turn][lane];
                }
                for (var c = 0u; c < COLUMNS; c++) {
                    let column = thread % WIDTH + c * WIDTH;
                    if (column < V_DIM) {
                        parts[place + 2u + column] = sums[turn * COLUMNS + c][lane];
                    }
                }
            }
        }
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
    let record = TASK_WORDS * (number / units);
    let first_row = records[record];
    let head = number % units * HEADS;
    let all_heads = args[ALL_HEADS];
    let task = Task(
        records[record + 1u],
        head,
        head * args[K_HEADS] / all_heads,
        head * args[V_HEADS] / all_heads,
    );
    // The token and the group of four queries whose logits this thread handles, if `busy` is true.
    let busy = thread < QUADS * TOKENS;
    let quad = min(thread / TOKENS, QUADS - 1u);
    if (thread < QUADS) {
        most[thread] = vec4<f32>(LOWEST);
    }
    var run = records[record + 2u];
    for (var r = 0u; r < records[record + 3u]; r++) {
        // Each run rotates the queries by its own positions, so they are loaded again.
        if (r == 0u || PAIRS > 0u) {
            workgroupBarrier();
            load_queries(KEYS, task, first_row, thread);
            workgroupBarrier();
        }
        if (LATENT && r == 0u) {
            load_queries(VALUES, task, first_row, thread);
        }
        if (PAIRS > 0u) {
            turn_queries(task, run, thread);
        }
        let end = records[run + 3u];
        for (var start = records[run + 2u]; start < end; start += TOKENS) {
            load_tile(KEYS, run, start, end, task.k_head, thread);
            workgroupBarrier();
            if (UNROTATED) {
                turn_keys(run, start, end, thread);
                workgroupBarrier();
            }
            multiply(KEYS, thread);
            workgroupBarrier();
            load_tile(VALUES, run, start, end, task.v_head, thread);
            if (LATENT) {
                workgroupBarrier();
                multiply(VALUES, thread);
                workgroupBarrier();
            }
            let tokens = seen(task, run, start, quad);
            if (busy) {
                add_shares(tokens, run, thread);
            }
            workgroupBarrier();
            let high = highest(quad);
            workgroupBarrier();
            if (busy) {
                soften(tokens, high, thread);
            }
            workgroupBarrier();
            add_values(thread);
            workgroupBarrier();
        }
        run += RUN_WORDS + ROW_WORDS * (QUERIES / HEADS);
    }
    write_parts(task, records[record + 4u], thread);
}
