// Reads f16 with the device's own 16-bit arithmetic.
fn f16_of(word: u32, lane: u32) -> f32 {
    return f32(bitcast<f16>(u16(word >> (16u * lane))));
}
