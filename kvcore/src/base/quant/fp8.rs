//! The two 8-bit float types of the OCP specification (OFP8, revision 1.0).

/// The kind of 8-bit float.
///
/// ```
/// use kvcore::Fp8Kind;
/// let e4m3 = Fp8Kind::E4M3;
/// assert_eq!(e4m3.decode(e4m3.encode(0.3)), 0.3125);
/// assert_eq!(e4m3.decode(e4m3.encode(1e6)), 448.0); // finite values saturate
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Kind {
    /// 4 exponent and 3 mantissa bits, no infinity, largest value 448.
    E4M3,
    /// 5 exponent and 2 mantissa bits, IEEE-like, largest value 57344.
    E5M2,
}

const SIGN: u8 = 0x80;
/// Number of mantissa bits of an f32.
const F32_MANTISSA: u32 = 23;
const F32_BIAS: u32 = 127;

static E4M3: [f32; 256] = table(Fp8Kind::E4M3);
static E5M2: [f32; 256] = table(Fp8Kind::E5M2);

const fn table(kind: Fp8Kind) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = kind.value(code as u8);
        code += 1;
    }
    values
}

impl Fp8Kind {
    const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
        }
    }

    const fn bias(self) -> u32 {
        match self {
            Self::E4M3 => 7,
            Self::E5M2 => 15,
        }
    }

    /// Returns the code of the largest finite value.
    const fn max_code(self) -> u8 {
        match self {
            Self::E4M3 => 0x7e,
            Self::E5M2 => 0x7b,
        }
    }

    /// Returns the largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57_344.0,
        }
    }

    /// Returns the smallest positive value: one step of the subnormal range.
    pub const fn smallest(self) -> f32 {
        f32::from_bits((F32_BIAS + 1 - self.bias() - self.mantissa_bits()) << F32_MANTISSA)
    }

    /// Returns the smallest positive normal value.
    const fn smallest_normal(self) -> f32 {
        f32::from_bits((F32_BIAS + 1 - self.bias()) << F32_MANTISSA)
    }

    /// Computes the value of a code from the definition of the format.
    const fn value(self, code: u8) -> f32 {
        let magnitude = code & !SIGN;
        let x = if magnitude > self.max_code() {
            let infinite = matches!(self, Self::E5M2) && magnitude == self.max_code() + 1;
            if infinite { f32::INFINITY } else { f32::NAN }
        } else if magnitude >> self.mantissa_bits() == 0 {
            magnitude as f32 * self.smallest()
        } else {
            let exponent = (F32_BIAS - self.bias()) << F32_MANTISSA;
            f32::from_bits(((magnitude as u32) << (F32_MANTISSA - self.mantissa_bits())) + exponent)
        };
        if code & SIGN == 0 { x } else { -x }
    }

    /// Returns the exact value of a code.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Self::E4M3 => E4M3[usize::from(code)],
            Self::E5M2 => E5M2[usize::from(code)],
        }
    }

    // Decision: docs/decisions/base.md#fp8-e4m3-stores-infinity-as-nan
    /// Returns the code nearest to `x`, ties to even. Finite values beyond [`max`](Self::max) saturate.
    ///
    /// NaN stays NaN. Infinity stays infinity in E5M2 and becomes NaN in E4M3, which has no infinity.
    pub fn encode(self, x: f32) -> u8 {
        let sign = if x.is_sign_negative() { SIGN } else { 0 };
        let magnitude = x.abs();
        sign | if magnitude.is_nan() {
            !SIGN
        } else if magnitude.is_infinite() {
            match self {
                Self::E4M3 => !SIGN,
                Self::E5M2 => self.max_code() + 1,
            }
        } else if magnitude >= self.max() {
            self.max_code()
        } else if magnitude < self.smallest_normal() {
            (magnitude / self.smallest()).round_ties_even() as u8
        } else {
            let dropped = F32_MANTISSA - self.mantissa_bits();
            let bits = magnitude.to_bits();
            let to_even = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
            (((bits + to_even) >> dropped) - ((F32_BIAS - self.bias()) << self.mantissa_bits())) as u8
        }
    }

    /// Returns the smallest static scale at which a tensor of largest magnitude `amax` does not saturate. The
    /// scale is a normal f32, and 1 if `amax` is not a positive finite number.
    pub fn scale_for(self, amax: f32) -> f32 {
        if amax.is_finite() && amax > 0.0 { (amax / self.max()).max(f32::MIN_POSITIVE) } else { 1.0 }
    }

    /// Encodes `row / scale`. Finite elements saturate, however small the scale is.
    pub fn encode_row(self, row: &[f32], scale: f32, codes: &mut [u8]) {
        for (code, &x) in codes.iter_mut().zip(row) {
            let scaled = x / scale;
            *code = self.encode(if x.is_finite() { scaled.clamp(-self.max(), self.max()) } else { scaled });
        }
    }

    /// Decodes `codes` and multiplies the values by `scale`.
    pub fn decode_row(self, codes: &[u8], scale: f32, row: &mut [f32]) {
        for (x, &code) in row.iter_mut().zip(codes) {
            *x = self.decode(code) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Fp8Kind; 2] = [Fp8Kind::E4M3, Fp8Kind::E5M2];

    #[test]
    fn every_code_decodes_and_encodes_to_itself() {
        for kind in KINDS {
            for code in 0..=255 {
                let x = kind.decode(code);
                if x.is_nan() {
                    assert!(kind.decode(kind.encode(x)).is_nan());
                } else {
                    assert_eq!(kind.encode(x), code, "{kind:?} {x}");
                }
            }
        }
    }

    #[test]
    fn limits_are_those_of_the_specification() {
        let nan = |kind: Fp8Kind| (0..=255).filter(|&c| kind.decode(c).is_nan()).collect::<Vec<u8>>();
        assert_eq!(nan(Fp8Kind::E4M3), [0x7f, 0xff]);
        assert_eq!(nan(Fp8Kind::E5M2), [0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff]);
        assert_eq!((Fp8Kind::E4M3.decode(0x7e), Fp8Kind::E4M3.decode(0x01)), (448.0, 2f32.powi(-9)));
        assert_eq!((Fp8Kind::E5M2.decode(0x7b), Fp8Kind::E5M2.decode(0x81)), (57344.0, -(2f32.powi(-16))));
        assert_eq!(
            (Fp8Kind::E5M2.decode(0x7c), Fp8Kind::E5M2.decode(0xfc)),
            (f32::INFINITY, f32::NEG_INFINITY)
        );
        assert_eq!((Fp8Kind::E4M3.decode(0x38), Fp8Kind::E5M2.decode(0x3c)), (1.0, 1.0));
    }

    #[test]
    fn only_finite_numbers_saturate() {
        for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(Fp8Kind::E4M3.decode(Fp8Kind::E4M3.encode(x)).is_nan());
        }
        assert_eq!(Fp8Kind::E5M2.decode(Fp8Kind::E5M2.encode(f32::NEG_INFINITY)), f32::NEG_INFINITY);
        for kind in KINDS {
            assert_eq!(kind.decode(kind.encode(f32::MAX)), kind.max());
            let mut codes = [0; 2];
            kind.encode_row(&[f32::MAX, -1.0], 1e-30, &mut codes);
            assert_eq!(codes.map(|c| kind.decode(c)), [kind.max(), -kind.max()]);
            for amax in [0.0, f32::NAN, f32::INFINITY] {
                assert_eq!(kind.scale_for(amax), 1.0);
            }
            assert_eq!(kind.scale_for(kind.max() * 3.0), 3.0);
        }
    }

    /// Returns the nearest of the 256 values. In a tie, returns the value with the even code.
    fn nearest(kind: Fp8Kind, x: f32) -> f32 {
        let x = f64::from(x.clamp(-kind.max(), kind.max()));
        let distance = |code: u8| (f64::from(kind.decode(code)) - x).abs();
        (0..=255u8)
            .filter(|&code| kind.decode(code).is_finite())
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .map(|code| kind.decode(code))
            .unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn encoding_is_to_the_nearest(bits in any::<u32>(), kind in 0..2usize) {
            let (kind, x) = (KINDS[kind], f32::from_bits(bits));
            prop_assume!(x.is_finite());
            prop_assert_eq!(kind.decode(kind.encode(x)), nearest(kind, x));
        }

        #[test]
        fn encoding_in_range_is_to_the_nearest(x in -500.0f32..500.0, tiny in -1.0f32..1.0, kind in 0..2usize) {
            let kind = KINDS[kind];
            for x in [x, x * 200.0, tiny * 0.02, tiny * 1e-4] {
                prop_assert_eq!(kind.decode(kind.encode(x)), nearest(kind, x));
            }
        }

        #[test]
        fn ties_go_to_the_even_code(code in 0u8..0x7b, kind in 0..2usize) {
            let kind = KINDS[kind];
            let tie = f32::midpoint(kind.decode(code), kind.decode(code + 1));
            prop_assert_eq!(kind.encode(tie), code + (code & 1));
            prop_assert_eq!(kind.encode(-tie), SIGN | (code + (code & 1)));
        }
    }
}
