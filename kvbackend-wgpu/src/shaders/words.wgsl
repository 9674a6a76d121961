// Decision: docs/decisions/backend-wgpu.md#shared-words-are-changed-by-two-atomic-operations
// Writes to words of the destination. Rows may start and end inside a 32-bit word, and another thread may own
// the rest of that word. Reading, changing and writing back the word would lose the bits that the other
// thread wrote in between. A word with one owner is therefore stored; in any other word, atomic operations
// clear and set only the owner's bits and leave all other bits unchanged.

@group(0) @binding(1) var<storage, read_write> source: array<u32>;
@group(0) @binding(2) var<storage, read_write> dest: array<atomic<u32>>;

// Returns ones in the bits `low..high` of a word.
fn bits_between(low: u32, high: u32) -> u32 {
    if (high - low >= 32u) {
        return 0xffffffffu;
    }
    return ((1u << (high - low)) - 1u) << low;
}

// Writes the bits of `value` that `mask` selects to a word of the destination.
fn put(word: u32, mask: u32, value: u32) {
    if (mask == 0xffffffffu) {
        atomicStore(&dest[word], value);
    } else if (mask != 0u) {
        atomicAnd(&dest[word], ~mask);
        atomicOr(&dest[word], value & mask);
    }
}
