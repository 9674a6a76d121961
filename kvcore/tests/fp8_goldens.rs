//! The 8-bit float codecs give the same bytes as `PyTorch` (`proof/goldens/fp8/make.py`).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvcore::Fp8Kind;

#[test]
fn encodings_are_those_of_torch() {
    let mut compared = 0;
    for line in include_str!("goldens/fp8.csv").lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<u32> = line.split(',').map(|f| u32::from_str_radix(f, 16).unwrap()).collect();
        let x = f32::from_bits(fields[0]);
        for (kind, expected) in [(Fp8Kind::E4M3, fields[1] as u8), (Fp8Kind::E5M2, fields[2] as u8)] {
            let (got, both_nan) = (kind.encode(x), kind.decode(expected).is_nan());
            let same = got == expected || (both_nan && kind.decode(got).is_nan());
            assert!(same, "{kind:?} of {x:e} is {got:02x}, torch has {expected:02x}");
            compared += 1;
        }
    }
    assert!(compared > 500, "{compared} bytes compared");
}
