//! Symmetric integer quantisation, with one scale for each group of consecutive elements.

use half::f16;

use super::KvFormat;
use crate::base::{Result, same};

/// The kind of integer that stores a code.
///
/// The scale of a group is its largest magnitude divided by the largest code, rounded *up* to f16. No finite
/// element is clipped, and each one decodes to within half a scale of its value. A group has a NaN scale and
/// decodes to NaN if it contains NaN or infinity, or if its scale is too large for f16.
///
/// ```
/// use kvcore::IntKind;
/// let (mut codes, mut scales, mut back) = ([0; 4], [half::f16::ZERO; 2], [0.0; 4]);
/// IntKind::Int8.encode_row(&[127.0, -64.2, 0.0, 0.0], 2, &mut codes, &mut scales)?;
/// IntKind::Int8.decode_row(&codes, 2, &scales, &mut back)?;
/// assert_eq!(back, [127.0, -64.0, 0.0, 0.0]);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntKind {
    /// Codes −127..=127, one per byte.
    Int8,
    /// Codes −7..=7, two per byte, the first in the low half.
    Int4,
}

impl IntKind {
    /// Returns the largest code.
    pub const fn max(self) -> i8 {
        match self {
            Self::Int8 => 127,
            Self::Int4 => 7,
        }
    }

    // Decision: docs/decisions/base.md#integer-scales-are-rounded-up
    // Decision: docs/decisions/base.md#a-group-with-nan-is-nan
    /// Returns the scale of a group.
    pub fn scale_of(self, group: &[f32]) -> f16 {
        let mut amax = 0.0f32;
        for &x in group {
            if !x.is_finite() {
                return f16::NAN;
            }
            amax = amax.max(x.abs());
        }
        let limit = f32::from(self.max());
        let near = f16::from_f32(amax / limit);
        // The product of an 11-bit and a 7-bit number is exact in f32.
        let up = near.to_f32() * limit < amax;
        let scale = if up { f16::from_bits(near.to_bits() + 1) } else { near };
        if scale.is_finite() { scale } else { f16::NAN }
    }

    /// Encodes a row into one code per element and one scale per group.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `group` is 0. Returns [`Error::NotMultiple`] if `group` does not divide the
    /// length of the row or is odd for int4, and [`Error::Mismatch`] if `codes` or `scales` has the wrong
    /// length. Nothing is written in these cases.
    ///
    /// [`Error::Zero`]: crate::Error::Zero
    /// [`Error::NotMultiple`]: crate::Error::NotMultiple
    /// [`Error::Mismatch`]: crate::Error::Mismatch
    pub fn encode_row(self, row: &[f32], group: usize, codes: &mut [u8], scales: &mut [f16]) -> Result<()> {
        self.check_row(row.len(), group, codes.len(), scales.len())?;
        for ((part, codes), scale) in
            row.chunks(group).zip(codes.chunks_mut(self.bytes_of(group))).zip(scales)
        {
            *scale = self.scale_of(part);
            let (step, limit) = (scale.to_f32(), f32::from(self.max()));
            // If the scale is zero or NaN, all codes are 0.
            let code = |x: f32| if step > 0.0 { nearest((x / step).clamp(-limit, limit)) } else { 0 };
            match self {
                Self::Int8 => {
                    for (byte, &x) in codes.iter_mut().zip(part) {
                        *byte = code(x).cast_unsigned();
                    }
                }
                Self::Int4 => {
                    for (byte, pair) in codes.iter_mut().zip(part.chunks_exact(2)) {
                        let [low, high] = [pair[0], pair[1]].map(|x| code(x).cast_unsigned() & 0xf);
                        *byte = low | high << 4;
                    }
                }
            }
        }
        Ok(())
    }

    /// Decodes a row: multiplies each code by the scale of its group.
    ///
    /// # Errors
    /// Returns the errors of [`encode_row`](Self::encode_row).
    pub fn decode_row(self, codes: &[u8], group: usize, scales: &[f16], row: &mut [f32]) -> Result<()> {
        self.check_row(row.len(), group, codes.len(), scales.len())?;
        for ((part, codes), scale) in
            row.chunks_mut(group).zip(codes.chunks(self.bytes_of(group))).zip(scales)
        {
            let step = scale.to_f32();
            match self {
                Self::Int8 => {
                    for (x, byte) in part.iter_mut().zip(codes) {
                        *x = f32::from(byte.cast_signed()) * step;
                    }
                }
                Self::Int4 => {
                    for (pair, byte) in part.chunks_exact_mut(2).zip(codes) {
                        // An arithmetic shift extends the sign of the upper half.
                        pair[0] = f32::from((byte << 4).cast_signed() >> 4) * step;
                        pair[1] = f32::from(byte.cast_signed() >> 4) * step;
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that a row consists of whole groups, with one code per element and one scale per group.
    fn check_row(self, elements: usize, group: usize, codes: usize, scales: usize) -> Result<()> {
        let format = match self {
            Self::Int8 => KvFormat::Int8 { group },
            Self::Int4 => KvFormat::Int4 { group },
        };
        format.check_dim("row of elements", elements)?;
        same("codes of a row", elements / group * self.bytes_of(group), codes)?;
        same("scales of a row", elements / group, scales)
    }

    /// Returns the size of a group's codes, in bytes.
    fn bytes_of(self, group: usize) -> usize {
        match self {
            Self::Int8 => group,
            Self::Int4 => group.div_ceil(2),
        }
    }
}

/// Rounds to the nearest integer, ties to even, for magnitudes below 2²²: the addition shifts out all
/// fraction bits. A call to the math library for each element would take several times as long.
fn nearest(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2²³
    (x + SHIFT - SHIFT) as i32 as i8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(kind: IntKind, row: &[f32], group: usize) -> (Vec<f32>, Vec<f16>) {
        let mut codes = vec![0; row.len() / group * kind.bytes_of(group)];
        let mut scales = vec![f16::ZERO; row.len() / group];
        let mut back = vec![9.0; row.len()];
        kind.encode_row(row, group, &mut codes, &mut scales).unwrap();
        kind.decode_row(&codes, group, &scales, &mut back).unwrap();
        (back, scales)
    }

    #[test]
    fn the_first_of_two_is_in_the_low_half() {
        let (mut codes, mut scales) = ([0], [f16::ZERO]);
        IntKind::Int4.encode_row(&[7.0, -2.0], 2, &mut codes, &mut scales).unwrap();
        assert_eq!((codes, scales), ([0xe7], [f16::ONE]));
    }

    #[test]
    fn rows_that_are_no_whole_groups_are_refused() {
        for (kind, elements, group, codes, scales) in [
            (IntKind::Int4, 3, 3, 2, 1),
            (IntKind::Int4, 3, 2, 2, 2),
            (IntKind::Int4, 4, 2, 1, 2),
            (IntKind::Int8, 4, 0, 4, 1),
            (IntKind::Int8, 5, 4, 5, 2),
            (IntKind::Int8, 4, 2, 4, 1),
            (IntKind::Int8, 4, 2, 3, 2),
        ] {
            let (mut bytes, mut steps) = (vec![9; codes], vec![f16::ONE; scales]);
            let mut row = vec![5.0; elements];
            assert!(
                kind.encode_row(&row, group, &mut bytes, &mut steps).is_err(),
                "{kind:?} {elements} {group}"
            );
            assert!(kind.decode_row(&bytes, group, &steps, &mut row).is_err());
            assert!(bytes.iter().all(|x| *x == 9) && row.iter().all(|x| *x == 5.0), "nothing is written");
        }
    }

    #[test]
    fn codes_are_the_nearest_and_ties_are_even() {
        for (x, code) in [(0.5, 0), (1.5, 2), (-2.5, -2), (-3.5, -4), (126.5, 126), (126.51, 127), (-0.49, 0)]
        {
            assert_eq!(nearest(x), code, "{x}");
        }
    }

    #[test]
    fn groups_with_nan_or_infinity_are_nan_and_others_are_not() {
        const NAN: [bool; 6] = [false, false, true, true, false, false];
        for kind in [IntKind::Int8, IntKind::Int4] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e8] {
                let (back, _) = round_trip(kind, &[1.0, 0.5, bad, 1.0, 0.0, 0.0], 2);
                assert_eq!(back.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), NAN, "{kind:?} {bad}");
                assert_eq!(back[4..], [0.0, 0.0]);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

        #[test]
        fn elements_read_back_within_half_a_scale(
            row in prop::collection::vec(-1.0f32..1.0, 24),
            exponent in -40i32..18,
            group in prop::sample::select(vec![2usize, 4, 6, 12, 24]),
        ) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
            for kind in [IntKind::Int8, IntKind::Int4] {
                let (back, scales) = round_trip(kind, &row, group);
                for (i, (x, y)) in row.iter().zip(&back).enumerate() {
                    let step = scales[i / group].to_f32();
                    prop_assert!((x - y).abs() <= 0.50001 * step, "{:?} {} {} {}", kind, x, y, step);
                }
                if scales.iter().all(|scale| *scale == f16::ZERO || *scale >= f16::MIN_POSITIVE) {
                    prop_assert_eq!(&round_trip(kind, &back, group).0, &back, "a second time nothing is lost");
                }
                for (part, scale) in row.chunks(group).zip(&scales) {
                    let exact = part.iter().fold(0f32, |m, x| m.max(x.abs())) / f32::from(kind.max());
                    prop_assert!(scale.to_f32() <= exact * (1.0 + 1.0 / 1024.0) + 2f32.powi(-24), "no larger than it must be");
                }
            }
        }
    }
}
