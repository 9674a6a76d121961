// Attention mass: the weights of an entry's queries, summed for each token. Each workgroup takes one tile of
// tokens and the query heads that share a head of K and of V, and goes through all of the entry's rows, one
// run for each tile of rows. The sums of each unit of heads are left in `parts`; sums.wgsl adds them up.
//
// args: the parameters of attend_tile.wgsl, then the entry's first row, the place of the sums in `parts`, and
// the number of tokens. `parts` begins with the log-sum-exps of the entry's rows and heads. A task's part is
// the index of its first token's sum.

const FIRST_ROW: u32 = 31u;
const SUMS_AT: u32 = 32u;
const ALL_TOKENS: u32 = 33u;

const MINUS_INFINITY: u32 = 0xff800000u;

// Returns the weights of four queries for one token, from its logits.
fn weights_of(task: Task, tokens: Seen, first: u32, quad: u32, thread: u32) -> f32 {
    let sees_token = sees(tokens, thread % TOKENS);
    var sum = 0.0;
    for (var lane = 0u; lane < 4u; lane++) {
        let q = 4u * quad + lane;
        if (q / HEADS < task.rows && sees_token[lane]) {
            let row = first + q / HEADS - args[FIRST_ROW];
            let lse = parts[row * args[ALL_HEADS] + task.head + q % HEADS];
            // A row whose logits are all −∞ has no weights.
            if (bitcast<u32>(lse) != MINUS_INFINITY) {
                sum += exp(weight[thread][lane] - lse);
            }
        }
    }
    return sum;
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
    let unit = number % units;
    let all_heads = args[ALL_HEADS];
    let head = unit * HEADS;
    let k_head = head * args[K_HEADS] / all_heads;
    let v_head = head * args[V_HEADS] / all_heads;
    let rows_per_run = QUERIES / HEADS;
    let busy = thread < QUADS * TOKENS;
    let quad = min(thread / TOKENS, QUADS - 1u);
    var run = records[record + 2u];
    let start = records[run + 2u];
    let end = records[run + 3u];
    // The weights of this thread's fours of queries for its token.
    var sum = 0.0;
    for (var r = 0u; r < records[record + 3u]; r++) {
        let first = records[record] + r * rows_per_run;
        let rows = min(rows_per_run, records[record + 1u] - r * rows_per_run);
        let task = Task(rows, head, k_head, v_head);
        workgroupBarrier();
        load_queries(KEYS, task, first, thread);
        if (LATENT) {
            load_queries(VALUES, task, first, thread);
        }
        // Latents take the place of the keys.
        if (r == 0u || LATENT) {
            load_tile(KEYS, run, start, end, k_head, thread);
        }
        workgroupBarrier();
        if (PAIRS > 0u) {
            turn_queries(task, run, thread);
        }
        if (UNROTATED && (r == 0u || LATENT)) {
            turn_keys(run, start, end, thread);
        }
        workgroupBarrier();
        multiply(KEYS, thread);
        workgroupBarrier();
        if (LATENT) {
            load_tile(VALUES, run, start, end, v_head, thread);
            workgroupBarrier();
            multiply(VALUES, thread);
            workgroupBarrier();
        }
        let tokens = seen(task, run, start, quad);
        if (busy) {
            add_shares(tokens, run, thread);
            sum += weights_of(task, tokens, first, quad, thread);
        }
        run += RUN_WORDS + ROW_WORDS * rows_per_run;
    }
    workgroupBarrier();
    if (busy) {
        weight[thread] = vec4<f32>(sum);
    }
    workgroupBarrier();
    if (thread < TOKENS && start + thread < end) {
        var total = 0.0;
        for (var q = 0u; q < QUADS; q++) {
            total += weight[q * TOKENS + thread].x;
        }
        parts[args[SUMS_AT] + unit * args[ALL_TOKENS] + records[record + 4u] + thread] = total;
    }
}
