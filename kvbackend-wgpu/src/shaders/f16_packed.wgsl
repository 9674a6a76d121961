// Reads f16 on devices without 16-bit arithmetic.
fn f16_of(word: u32, lane: u32) -> f32 {
    return unpack2x16float(word)[lane];
}
