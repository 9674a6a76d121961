//! Stand-in for products of matrices on processors that cannot multiply tiles of bf16.

use kvcore::{Attend, TensorView};

use super::block::TileAttention;
use super::source::SourcePlane;
use crate::simd::SimdLevel;

/// A form of queries; none exists.
#[derive(Clone, Copy)]
pub(super) enum MatrixForm {}

/// Memory of an item; none exists.
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

    /// Never called, because no form exists.
    ///
    /// # Safety
    /// No conditions.
    pub(super) unsafe fn buffers(self, _: usize, _: usize, _: &mut Vec<f32>) -> MatrixBuffers {
        match self {}
    }
}

impl MatrixBuffers {
    /// Never called, because no buffers exist.
    ///
    /// # Safety
    /// No conditions.
    pub(super) unsafe fn put_queries(&self, _: usize, _: usize, _: usize, _: *const f32) {
        match *self {}
    }
}

impl TileAttention<'_> {
    /// Never called, because no buffers exist.
    ///
    /// # Safety
    /// No conditions.
    pub(super) unsafe fn by_matrices(&self, buffers: &MatrixBuffers, _: usize) {
        match *buffers {}
    }
}
