//! An inline list of extents or strides. Views are created in every step, so the list must not allocate
//! memory.

use std::ops::{Deref, DerefMut};

use crate::base::{Error, Result};

/// Maximum number of axes per view.
pub const MAX_RANK: usize = 6;

/// A list of up to [`MAX_RANK`] extents or strides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    values: [usize; MAX_RANK],
    rank: usize,
}

impl Dims {
    /// Creates a list that contains `values`.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if there are more than [`MAX_RANK`] values.
    pub fn new(values: &[usize]) -> Result<Self> {
        let mut dims = Self { values: [0; MAX_RANK], rank: values.len() };
        dims.values
            .get_mut(..values.len())
            .ok_or(Error::too_large("rank", values.len(), MAX_RANK))?
            .copy_from_slice(values);
        Ok(dims)
    }

    /// Returns the number of axes.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the row-major strides of these extents.
    ///
    /// # Errors
    /// Returns [`Error::Overflow`] if a stride does not fit in the address space.
    pub fn dense_strides(&self) -> Result<Self> {
        let mut strides = *self;
        let mut next = 1usize;
        for axis in (0..self.rank).rev() {
            strides.values[axis] = next;
            next = next
                .checked_mul(self.values[axis].max(1))
                .ok_or(Error::Overflow { what: "strides of a view" })?;
        }
        Ok(strides)
    }

    pub(super) fn with(mut self, axis: usize, value: usize) -> Result<Self> {
        if axis > self.rank || self.rank == MAX_RANK {
            return Err(Error::too_large("axis", axis.max(self.rank), self.rank.min(MAX_RANK - 1)));
        }
        self.values.copy_within(axis..self.rank, axis + 1);
        self.values[axis] = value;
        self.rank += 1;
        Ok(self)
    }

    pub(super) fn without(mut self, axis: usize) -> Self {
        self.values.copy_within(axis + 1..self.rank, axis);
        self.rank -= 1;
        self
    }
}

impl Deref for Dims {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.values[..self.rank]
    }
}

impl DerefMut for Dims {
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.values[..self.rank]
    }
}
