//! Stand-in for products by the matrix unit on processors that have none.

use super::Matrix;
use crate::raw::Target;
use crate::simd::SimdLevel;
use crate::workers::Workers;

/// Returns false: there is no matrix unit.
pub(super) fn multiply(
    _: SimdLevel,
    _: (&Workers, usize),
    _: (&[f32], usize),
    _: &Matrix<'_>,
    _: Target<'_>,
) -> bool {
    false
}
