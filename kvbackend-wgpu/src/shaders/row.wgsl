// One row of one head in workgroup memory, and the code to write it. Each thread writes whole words of the
// destination, or the row's part of the words at its ends. The kernel that includes this file defines
// `coded`, which returns the bits of an element.

override DEST: u32;
// The number of elements per row.
override DIM: u32;

const THREADS: u32 = 64u;

var<workgroup> row: array<f32, DIM>;

fn write_row(at: u32, thread: u32) {
    let bits = bits_of(DEST);
    let lanes = 32u / bits;
    let first = at / lanes;
    let words = (at + DIM - 1u) / lanes - first + 1u;
    for (var w = thread; w < words; w += THREADS) {
        var mask = 0u;
        var value = 0u;
        for (var lane = 0u; lane < lanes; lane++) {
            // For lanes before the row, the subtraction wraps around to an index past the row's end.
            let element = (first + w) * lanes + lane - at;
            if (element < DIM) {
                mask |= bits_between(bits * lane, bits * (lane + 1u));
                value |= coded(element) << (bits * lane);
            }
        }
        put(first + w, mask, value);
    }
}
