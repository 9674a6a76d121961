//! Mathematical functions that all instruction sets share.

use super::Simd;

/// Converts the bits of an f16 to f32 without branching.
///
/// The arithmetic is described in Marat Dukhan's FP16 library: the exponent bias is changed for normal
/// numbers, and a constant is subtracted for denormal numbers.
#[inline(always)]
pub(crate) fn from_f16(bits: u16) -> f32 {
    let bits = u32::from(bits) << 16;
    let (sign, twice) = (bits & 0x8000_0000, bits << 1);
    let normal = f32::from_bits((twice >> 4).wrapping_add(0xe0 << 23)) * f32::from_bits(0x0780_0000);
    let denormal = f32::from_bits((twice >> 17) | (126 << 23)) - 0.5;
    let magnitude = if twice < 1 << 27 { denormal } else { normal };
    f32::from_bits(sign | magnitude.to_bits())
}

/// Returns `e^x` to about one unit in the last place for `−87 ≤ x ≤ 88`. The result is 0 below −87.7, and NaN
/// for NaN.
///
/// Uses `e^x = 2^n · e^r` with an integer `n` and `|r| ≤ ln 2 / 2`. `e^r` is approximated by its Taylor
/// polynomial of degree 7, whose remainder is below 2⁻²⁷ in this range.
///
/// # Safety
/// The processor must support the instruction set of `S`, and the caller must be compiled for it, as [`Simd`]
/// requires.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the instruction set of `S` is available by contract, and no pointers are involved.
    unsafe {
        let x = S::max(S::splat(-88.1), S::min(S::splat(88.3), x));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 is split into two parts. The first part has trailing zeros, so its product with n is exact.
        let r = S::mul_add(n, S::splat(-0.693_359_4), x);
        let r = S::mul_add(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = S::mul_add(p, r, S::splat(c));
        }
        S::scale_by_power(p, n)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AvailableLevel, SimdLevel, SimdTask};
    use super::*;
    use half::f16;

    struct Exp<'a>(&'a [f32], &'a mut Vec<f32>);

    impl SimdTask for Exp<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            let mut lanes = [0.0; 16];
            for &x in self.0 {
                // SAFETY: `lanes` has 16 elements, as many as the longest vector, and `AvailableLevel::run`
                // checked the instruction set.
                unsafe { S::store(lanes.as_mut_ptr(), exp::<S>(S::splat(x))) };
                assert!(lanes[..S::LANES].iter().all(|y| y.to_bits() == lanes[0].to_bits()));
                self.1.push(lanes[0]);
            }
        }
    }

    #[test]
    fn exp_is_good_to_the_last_places_on_every_level() {
        let x: Vec<f32> = (-8700..=0).map(|i| i as f32 / 100.0).chain([1.5, 20.0, 88.0]).collect();
        for level in SimdLevel::ALL.into_iter().filter(|level| level.is_available()) {
            let mut got = Vec::new();
            // SAFETY: `Exp` has no safety conditions.
            unsafe { AvailableLevel::new(level).unwrap().run(Exp(&x, &mut got)) };
            for (x, y) in x.iter().zip(&got) {
                let expected = f64::from(*x).exp();
                let error = (f64::from(*y) - expected).abs() / expected;
                assert!(error < 3e-7, "{level}: e^{x} = {y}, off by {error:e}");
            }
            let mut edges = Vec::new();
            let odd = [f32::NEG_INFINITY, -200.0, f32::NAN];
            // SAFETY: `Exp` has no safety conditions.
            unsafe { AvailableLevel::new(level).unwrap().run(Exp(&odd, &mut edges)) };
            assert_eq!(edges[..2], [0.0, 0.0], "{level}");
            assert!(edges[2].is_nan(), "{level}");
        }
    }

    #[test]
    fn every_half_is_read_exactly() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (from_f16(bits), f16::from_bits(bits).to_f32());
            assert!(got == expected || got.is_nan() && expected.is_nan(), "{bits:#x}: {got} and {expected}");
        }
    }
}
