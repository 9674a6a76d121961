// Copies rows of any length at any byte offset: scatter, gather, copy_blocks, swap_blocks and copy_tensor if
// elements keep their type. One thread writes one word of the destination, or the row's part of that word. A
// row has one thread per word that it may touch. Lengths, strides and offsets in args are in bytes.

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = place_of(linear(group, groups) * THREADS + thread);
    let word = place.dst / 4u + place.at;
    let low = max(place.dst, 4u * word);
    let high = min(place.dst + args[5], 4u * word + 4u);
    if (!place.inside || low >= high) {
        return;
    }
    // The four bytes of the source that belong to this word. At the ends of a row, some of them may be
    // outside the row.
    let first = i32(place.src) + i32(4u * word) - i32(place.dst);
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
