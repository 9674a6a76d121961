//! Stand-in for the matrix products, on processors that cannot multiply bf16 tiles.

use kvcore::{Attend, TensorView};

use super::block::TileAttention;
use super::source::SourcePlane;
use crate::simd::SimdLevel;

/// The form of queries in matrix products, which does not exist here.
#[derive(Clone, Copy)]
pub(super) enum MatrixForm {}

/// An item's buffers for matrix products, which do not exist here.
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

    /// Never called, because there is no form.
    ///
    /// # Safety
    /// There are no conditions.
    pub(super) unsafe fn buffers(self, _: usize, _: usize, _: &mut Vec<f32>) -> MatrixBuffers {
        match self {}
    }
}

impl MatrixBuffers {
    /// Never called, because there are no buffers.
    ///
    /// # Safety
    /// There are no conditions.
    pub(super) unsafe fn put_queries(&self, _: usize, _: usize, _: usize, _: *const f32) {
        match *self {}
    }
}

impl TileAttention<'_> {
    /// Never called, because there are no buffers.
    ///
    /// # Safety
    /// There are no conditions.
    pub(super) unsafe fn by_matrices(&self, buffers: &MatrixBuffers, _: usize) {
        match *buffers {}
    }
}
