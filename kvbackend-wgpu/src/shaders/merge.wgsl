// The second half of attend and attend_mla. It merges the parts of each row and head and normalises the
// softmax: first within each merge group, then across the groups by their scaled log-sum-exps. One workgroup
// handles one row and head.
//
// args: [rows, heads, offset of the output, its strides of a row and a head, offset and strides of the
// log-sum-exp, offset of the groups' factors in the records]. records: a record for each row (row of the
// output, offset and length of its part list), the factors of the groups, and lists of (part of head 0,
// group), sorted by group.

@group(0) @binding(3) var<storage, read_write> lse: array<u32>;
@group(0) @binding(4) var<storage, read> records: array<u32>;

override WITH_LSE: bool;

const LOWEST: f32 = -3.4028234e38;
const MINUS_INFINITY: u32 = 0xff800000u;

fn part(i: u32) -> f32 {
    return bitcast<f32>(source[i]);
}

fn coded(element: u32) -> u32 {
    return encode(DEST, row[element]);
}

// Returns whether nothing was added to a sum. NaN counts as added. The bits are compared, because on some
// devices NaN is neither equal nor unequal to 0.
fn is_zero(sum: f32) -> bool {
    return bitcast<u32>(sum) == 0u;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = linear(group_id, groups);
    let heads = args[1];
    if (number / heads >= args[0]) {
        return;
    }
    let head = number % heads;
    let record = 3u * (number / heads);
    let out_row = records[record];
    let list = records[record + 1u];
    let count = records[record + 2u];
    let width = DIM + 2u;

    var most = LOWEST;
    var total = 0.0;
    for (var d = thread; d < DIM; d += THREADS) {
        row[d] = 0.0;
    }
    var next = 0u;
    while (next < count) {
        let begin = next;
        let group = records[list + 2u * begin + 1u];
        var high = LOWEST;
        while (next < count && records[list + 2u * next + 1u] == group) {
            high = max(high, part((records[list + 2u * next] + head) * width));
            next++;
        }
        var sum = 0.0;
        for (var i = begin; i < next; i++) {
            let place = (records[list + 2u * i] + head) * width;
            sum += part(place + 1u) * exp(part(place) - high);
        }
        if (!is_zero(sum)) {
            let group_lse = (high + log(sum)) * bitcast<f32>(records[args[8] + group]);
            let before = most;
            if (group_lse > most) {
                most = group_lse;
            }
            let shrink = exp(before - most);
            let grow = exp(group_lse - most);
            total = total * shrink + grow;
            for (var d = thread; d < DIM; d += THREADS) {
                var value = 0.0;
                for (var i = begin; i < next; i++) {
                    let place = (records[list + 2u * i] + head) * width;
                    if (!is_zero(part(place + 1u))) {
                        value += part(place + 2u + d) * exp(part(place) - high);
                    }
                }
                row[d] = row[d] * shrink + value / sum * grow;
            }
        }
    }
    if (!is_zero(total)) {
        for (var d = thread; d < DIM; d += THREADS) {
            row[d] = row[d] / total;
        }
    }
    if (WITH_LSE && thread == 0u) {
        var bits = MINUS_INFINITY;
        if (!is_zero(total)) {
            bits = bitcast<u32>(most + log(total));
        }
        lse[args[5] + out_row * args[6] + head * args[7]] = bits;
    }
    workgroupBarrier();

    write_row(args[2] + out_row * args[3] + head * args[4], thread);
}
