//! Stand-in for products of matrices on processors that cannot multiply tiles of bf16.

use kvcore::{Attend, TensorView};

use super::block::Meeting;
use super::source::Source;
use crate::simd::SimdLevel;

/// A form of queries; none exists.
#[derive(Clone, Copy)]
pub(super) enum Form {}

/// Memory of an item; none exists.
pub(super) enum Room {}

impl Form {
    pub(super) fn of(_: SimdLevel, _: &Attend, _: Option<&TensorView>, _: [&Source<'_>; 2]) -> Option<Self> {
        None
    }

    /// Never called, because no form exists.
    ///
    /// # Safety
    /// No conditions.
    pub(super) unsafe fn room(self, _: usize, _: usize, _: &mut Vec<f32>) -> Room {
        match self {}
    }
}

impl Room {
    /// Never called, because no room exists.
    ///
    /// # Safety
    /// No conditions.
    pub(super) unsafe fn put_queries(&self, _: usize, _: usize, _: usize, _: *const f32) {
        match *self {}
    }
}

impl Meeting<'_> {
    /// Never called, because no room exists.
    ///
    /// # Safety
    /// No conditions.
    pub(super) unsafe fn by_matrices(&self, room: &Room, _: usize) {
        match *room {}
    }
}
