//! Stand-in for the matrix unit's products, for architectures without a matrix unit.

use super::Matrix;
use crate::raw::Destination;
use crate::simd::SimdLevel;
use crate::workers::Workers;

/// Returns false, because there is no matrix unit.
pub(super) fn multiply(
    _: SimdLevel,
    _: (&Workers, usize),
    _: (&[f32], usize),
    _: &Matrix<'_>,
    _: Destination<'_>,
) -> bool {
    false
}
