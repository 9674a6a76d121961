// Reads f16 with the 16-bit arithmetic of the device.
fn f16_of(word: u32, lane: u32) -> f32 {
    return f32(bitcast<f16>(u16(word >> (16u * lane))));
}
