// Conversion of elements from their bits to f32 and back. An element's kind is a pipeline constant at every
// call, so the compiler keeps only one case of each switch.
//
// Decision: docs/decisions/backend-wgpu.md#f32-is-rounded-by-integer-arithmetic
// f32 is converted to f16, bf16 and fp8 by operations on bits, to nearest, ties to even: WGSL does not
// specify how its own conversions round, or how they treat NaN.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;
const E4M3: u32 = 3u;
const E5M2: u32 = 4u;
const I8: u32 = 5u;
const I4: u32 = 6u;

const NAN_BITS: u32 = 0x7fc00000u;

fn bits_of(kind: u32) -> u32 {
    switch (kind) {
        case F32: { return 32u; }
        case F16, BF16: { return 16u; }
        case I4: { return 4u; }
        default: { return 8u; }
    }
}

fn is_nan_bits(magnitude: u32) -> bool {
    return magnitude > 0x7f800000u;
}

// Decodes an 8-bit float with `mantissa` mantissa bits and the given exponent bias.
fn fp8_of(code: u32, mantissa: u32, bias: u32) -> f32 {
    let magnitude = code & 0x7fu;
    var x = 0u;
    if (magnitude >> mantissa == 0u) {
        // A subnormal number is a multiple of the smallest value.
        x = bitcast<u32>(f32(magnitude) * bitcast<f32>((128u - bias - mantissa) << 23u));
    } else {
        x = (magnitude << (23u - mantissa)) + ((127u - bias) << 23u);
    }
    return bitcast<f32>(x | ((code & 0x80u) << 24u));
}

fn e4m3_of(code: u32) -> f32 {
    if ((code & 0x7fu) == 0x7fu) {
        return bitcast<f32>(NAN_BITS + (code & 0u));
    }
    return fp8_of(code, 3u, 7u);
}

fn e5m2_of(code: u32) -> f32 {
    let magnitude = code & 0x7fu;
    if (magnitude >= 0x7cu) {
        return bitcast<f32>((0x7f800000u | ((magnitude & 3u) << 21u)) | ((code & 0x80u) << 24u));
    }
    return fp8_of(code, 2u, 15u);
}

// Returns the element in the given lane of a word; for integers, the code itself.
fn decode(kind: u32, word: u32, lane: u32) -> f32 {
    switch (kind) {
        case F32: { return bitcast<f32>(word); }
        case F16: { return f16_of(word, lane); }
        case BF16: { return bitcast<f32>((word >> (16u * lane)) << 16u); }
        case E4M3: { return e4m3_of((word >> (8u * lane)) & 0xffu); }
        case E5M2: { return e5m2_of((word >> (8u * lane)) & 0xffu); }
        case I8: { return f32(i32(word << (24u - 8u * lane)) >> 24u); }
        default: { return f32(i32(word << (28u - 4u * lane)) >> 28u); }
    }
}

fn f16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (is_nan_bits(magnitude)) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x477ff000u) { // rounds to infinity
        return sign | 0x7c00u;
    }
    if (magnitude < 0x38800000u) { // below the normal range: whole steps of 2^-24
        return sign | u32(round(bitcast<f32>(magnitude) * 16777216.0));
    }
    return sign | ((magnitude + 0xfffu + ((magnitude >> 13u) & 1u) - 0x38000000u) >> 13u);
}

fn bf16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (is_nan_bits(bits & 0x7fffffffu)) {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

// Encodes an 8-bit float. Finite values saturate at the largest finite value, whose code is `largest`.
fn fp8_bits(x: f32, mantissa: u32, bias: u32, largest: u32, infinity: u32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 24u) & 0x80u;
    let magnitude = bits & 0x7fffffffu;
    if (is_nan_bits(magnitude)) {
        return sign | 0x7fu;
    }
    if (magnitude == 0x7f800000u) {
        return sign | infinity;
    }
    let shift = 23u - mantissa;
    if (magnitude >= (largest << shift) + ((127u - bias) << 23u)) {
        return sign | largest;
    }
    if (magnitude < (128u - bias) << 23u) {
        let steps = bitcast<f32>((126u + bias + mantissa) << 23u); // one over the smallest value
        return sign | u32(round(bitcast<f32>(magnitude) * steps));
    }
    let even = (1u << (shift - 1u)) - 1u + ((magnitude >> shift) & 1u);
    return sign | (((magnitude + even) >> shift) - ((127u - bias) << mantissa));
}

// Returns the bits that encode x; for integers, the bits of the nearest code, with ties to even.
fn encode(kind: u32, x: f32) -> u32 {
    switch (kind) {
        case F32: { return bitcast<u32>(x); }
        case F16: { return f16_bits(x); }
        case BF16: { return bf16_bits(x); }
        case E4M3: { return fp8_bits(x, 3u, 7u, 0x7eu, 0x7fu); }
        case E5M2: { return fp8_bits(x, 2u, 15u, 0x7bu, 0x7cu); }
        case I8: { return u32(i32(round(x))) & 0xffu; }
        default: { return u32(i32(round(x))) & 0xfu; }
    }
}
