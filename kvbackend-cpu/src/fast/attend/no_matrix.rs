//! Stand-in for the matrix products, for architectures without a matrix unit.

use kvcore::{Attend, TensorView};

use super::block::TileAttention;
use super::source::SourcePlane;
use crate::simd::SimdLevel;

/// Stand-in for the form of matrix products. It has no values.
#[derive(Clone, Copy)]
pub(super) enum MatrixForm {}

/// Stand-in for an item's buffers for matrix products. It has no values.
pub(super) enum MatrixBuffers {}

impl MatrixForm {
    pub(super) fn of(
        _: SimdLevel,
        _: &Attend,
        _: Option<&TensorView>,
        _: [&SourcePlane<'_>; 2],
    ) -> Option<Self> {
        None
    }

    /// Unreachable, because a [`MatrixForm`] cannot be created.
    ///
    /// # Safety
    /// There are no conditions.
    pub(super) unsafe fn buffers(self, _: usize, _: usize, _: &mut Vec<f32>) -> MatrixBuffers {
        match self {}
    }
}

impl MatrixBuffers {
    /// Unreachable, because [`MatrixBuffers`] cannot be created.
    ///
    /// # Safety
    /// There are no conditions.
    pub(super) unsafe fn put_queries(&self, _: usize, _: usize, _: usize, _: *const f32) {
        match *self {}
    }
}

impl TileAttention<'_> {
    /// Unreachable, because [`MatrixBuffers`] cannot be created.
    ///
    /// # Safety
    /// There are no conditions.
    pub(super) unsafe fn by_matrices(&self, buffers: &MatrixBuffers, _: usize) {
        match *buffers {}
    }
}
