// Copies of rows of any length at any byte: scatter, gather, copy_blocks, swap_blocks and copy_tensor where
// elements keep their type. One thread makes one word of the destination, or its part of that word.
//
// args: [items, n0, n1, n2, words that a row of the destination may touch, bytes of a row, source strides
// of the three axes, strides of the destination], then the places of each item in source and destination.
// All but the words in bytes.

const HEADER: u32 = 12u;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let id = linear(group, groups) * 256u + thread;
    let n = vec3<u32>(args[1], args[2], args[3]);
    let words = args[4];
    let run = id / words;
    let item = run / (n.x * n.y * n.z);
    if (item >= args[0]) {
        return;
    }
    let index = vec3<u32>(run / (n.y * n.z) % n.x, run / n.z % n.y, run % n.z);
    let src_step = vec3<u32>(args[6], args[7], args[8]) * index;
    let dst_step = vec3<u32>(args[9], args[10], args[11]) * index;
    let place = HEADER + 2u * item;
    let src = args[place] + src_step.x + src_step.y + src_step.z;
    let dst = args[place + 1u] + dst_step.x + dst_step.y + dst_step.z;

    let word = dst / 4u + id % words;
    let low = max(dst, 4u * word);
    let high = min(dst + args[5], 4u * word + 4u);
    if (low >= high) {
        return;
    }
    // The four bytes of the source that belong to this word; those of its ends may lie outside the row.
    let first = i32(src) + i32(4u * word) - i32(dst);
    let shift = 8u * u32(first & 3);
    var value = 0u;
    if (first >= 0) {
        value = source[u32(first) / 4u] >> shift;
    }
    if (shift != 0u) {
        value |= source[u32((first >> 2u) + 1)] << (32u - shift);
    }
    put(word, bits_between(8u * (low - 4u * word), 8u * (high - 4u * word)), value);
}
