//! Where no processor multiplies tiles of bf16.

use kvcore::{Attend, TensorView};

use super::block::Meeting;
use super::source::Source;
use crate::simd::SimdLevel;

/// There is none.
#[derive(Clone, Copy)]
pub(super) enum Form {}

/// There is none.
pub(super) enum Room {}

impl Form {
    pub(super) fn of(_: SimdLevel, _: &Attend, _: Option<&TensorView>, _: [&Source<'_>; 2]) -> Option<Self> {
        None
    }

    pub(super) unsafe fn room(self, _: usize, _: usize, _: &mut Vec<f32>) -> Room {
        match self {}
    }
}

impl Room {
    pub(super) unsafe fn put_queries(&self, _: usize, _: usize, _: usize, _: *const f32) {
        match *self {}
    }
}

impl Meeting<'_> {
    pub(super) unsafe fn by_matrices(&self, room: &Room, _: usize) {
        match *room {}
    }
}
