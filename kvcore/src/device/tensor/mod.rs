//! Tensor views: a shape and strides over a [`Storage`], with checked arithmetic.

use std::ops::Range;
use std::sync::Arc;

use crate::base::{DType, Error, Result, product};
use crate::device::Storage;

mod shape;
mod transfer;

pub use shape::{Dims, MAX_RANK};

/// A typed, strided view of a storage of any backend.
///
/// Cloning copies the shape and shares the storage; no elements are copied. The constructor checks that the
/// view is inside its storage.
#[derive(Debug, Clone)]
pub struct TensorView {
    storage: Arc<dyn Storage>,
    dtype: DType,
    shape: Dims,
    strides: Dims,
    offset: usize,
}

impl TensorView {
    /// Creates a dense row-major view with shape `shape` at the start of `storage`. A view of an arena's
    /// storage can be written without a permit, so the rule stated at
    /// [`KvArena::views`](crate::KvArena::views) applies to it.
    ///
    /// # Errors
    /// Returns the errors of [`Dims::new`] and of [`with_strides`](Self::with_strides).
    pub fn new(storage: Arc<dyn Storage>, dtype: DType, shape: &[usize]) -> Result<Self> {
        let shape = Dims::new(shape)?;
        let strides = shape.dense_strides()?;
        Self::with_strides(storage, dtype, shape, strides, 0)
    }

    /// Creates a view with explicit strides and offset, both in elements. The rule stated at
    /// [`new`](Self::new) applies.
    ///
    /// # Errors
    /// - Returns [`Error::TooLarge`] if the view reaches past the end of the storage.
    /// - Returns [`Error::Misaligned`] if the storage's address is not aligned for `dtype`, and
    ///   [`Error::InsideByte`] if the view begins inside a byte.
    /// - Returns [`Error::Mismatch`] if `shape` and `strides` have different ranks.
    /// - Returns [`Error::Overflow`] if a size does not fit in the address space.
    pub fn with_strides(
        storage: Arc<dyn Storage>,
        dtype: DType,
        shape: Dims,
        strides: Dims,
        offset: usize,
    ) -> Result<Self> {
        crate::base::same("rank of strides", shape.rank(), strides.rank())?;
        if !storage.address().is_multiple_of(dtype.align() as u64) {
            return Err(Error::Misaligned {
                what: "storage",
                address: storage.address(),
                align: dtype.align(),
            });
        }
        product("elements of a view", &shape)?;
        whole_bytes(&storage, dtype, offset)?;
        let view = Self { storage, dtype, shape, strides, offset };
        let end = dtype.bytes_for(view.end()?)?;
        if end > view.storage.len() {
            return Err(Error::too_large("last byte of the view", end, view.storage.len()));
        }
        Ok(view)
    }

    /// Returns the index after the last element of the view, or the offset if the view is empty.
    fn end(&self) -> Result<usize> {
        if self.shape.contains(&0) {
            return Ok(self.offset);
        }
        let mut last = self.offset;
        for (&n, &stride) in self.shape.iter().zip(self.strides.iter()) {
            last = product("extent of a view", &[n - 1, stride])?
                .checked_add(last)
                .ok_or(Error::Overflow { what: "extent of a view" })?;
        }
        last.checked_add(1).ok_or(Error::Overflow { what: "extent of a view" })
    }

    /// Returns the storage that the view refers to.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the strides in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Returns the offset of the first element from the start of the storage, in elements.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the view has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the elements are dense and in row-major order. An empty view counts as contiguous.
    pub fn is_contiguous(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut expected = 1;
        for (&n, &stride) in self.shape.iter().zip(self.strides.iter()).rev() {
            if n > 1 && stride != expected {
                return false;
            }
            expected *= n;
        }
        true
    }

    /// Returns the byte range in the storage from the first element to the last, including any gaps.
    ///
    /// # Errors
    /// Returns [`Error::Overflow`] if the size does not fit in the address space, which cannot happen for a
    /// valid view.
    pub fn extent(&self) -> Result<Range<usize>> {
        Ok(self.dtype.bytes_for(self.offset)?..self.dtype.bytes_for(self.end()?)?)
    }

    /// Returns the byte range in the storage that a copy of `bytes` host bytes reads or writes. Every backend
    /// calls this first in [`Stream::read`](crate::Stream::read) and [`Stream::write`](crate::Stream::write).
    ///
    /// # Errors
    /// Returns [`Error::InvalidStrides`] if the view is not contiguous, and [`Error::Mismatch`] if `bytes`
    /// is not the size of the view.
    pub fn host_range(&self, bytes: usize) -> Result<Range<usize>> {
        if !self.is_contiguous() {
            return Err(Error::InvalidStrides {
                what: "host copy",
                reason: "the view is not contiguous; gather or copy it first".to_owned(),
            });
        }
        crate::base::same("bytes of a host copy", self.dtype.bytes_for(self.len())?, bytes)?;
        self.extent()
    }

    /// Returns whether the byte ranges of both views, each from first to last element, overlap in memory,
    /// even if the views are in different storages over the same memory. Interleaved views overlap in this
    /// sense without sharing an element.
    pub fn overlaps(&self, other: &Self) -> Result<bool> {
        let range = |view: &Self| -> Result<_> {
            let (extent, address) = (view.extent()?, view.storage.address());
            Ok((address.saturating_add(extent.start as u64), address.saturating_add(extent.end as u64)))
        };
        let (a, b) = (range(self)?, range(other)?);
        Ok(a.0.max(b.0) < a.1.min(b.1))
    }

    /// Returns the device or host address of the element at `index`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if `index` and the view have different ranks, [`Error::OutOfRange`] if an
    /// index is past the end of its axis, and [`Error::InsideByte`] if the element starts inside a byte.
    pub fn address(&self, index: &[usize]) -> Result<u64> {
        crate::base::same("rank of an index", self.shape.rank(), index.len())?;
        let mut at = self.offset;
        for ((&i, &n), &stride) in index.iter().zip(self.shape.iter()).zip(self.strides.iter()) {
            if i >= n {
                return Err(Error::range("index", i, n));
            }
            at += i * stride;
        }
        whole_bytes(&self.storage, self.dtype, at)
    }

    /// Returns a view of the range `start..end` of axis `axis`, without copying.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if `axis` does not exist, [`Error::TooLarge`] if the range is reversed
    /// or ends past the axis, and [`Error::InsideByte`] if the new view starts inside a byte.
    pub fn slice(&self, axis: usize, start: usize, end: usize) -> Result<Self> {
        let n = *self.shape.get(axis).ok_or(Error::range("axis", axis, self.shape.rank()))?;
        if end > n {
            return Err(Error::too_large("end of the slice", end, n));
        }
        if start > end {
            return Err(Error::too_large("start of the slice", start, end));
        }
        let mut view = self.clone();
        view.shape[axis] = end - start;
        if start < end {
            view.offset += start * self.strides[axis];
            whole_bytes(&view.storage, view.dtype, view.offset)?;
        }
        Ok(view)
    }

    /// Returns the sub-view at `index` of axis `axis`, without that axis.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if `axis` or `index` does not exist, and [`Error::InsideByte`] if the
    /// sub-view starts inside a byte.
    pub fn select(&self, axis: usize, index: usize) -> Result<Self> {
        let n = *self.shape.get(axis).ok_or(Error::range("axis", axis, self.shape.rank()))?;
        if index >= n {
            return Err(Error::range("index", index, n));
        }
        let mut view = self.slice(axis, index, index + 1)?;
        view.shape = view.shape.without(axis);
        view.strides = view.strides.without(axis);
        Ok(view)
    }

    /// Returns a view of all elements with an additional axis of extent 1 before axis `axis`.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if `axis` exceeds the rank, or if the view already has [`MAX_RANK`] axes.
    pub fn unsqueeze(&self, axis: usize) -> Result<Self> {
        let (shape, strides) = (self.shape.with(axis, 1)?, self.strides.with(axis, 0)?);
        Ok(Self { shape, strides, ..self.clone() })
    }

    /// Returns a view of all elements with the axes in the order `axes`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the length of `axes` is not the rank, [`Error::OutOfRange`] if an axis
    /// does not exist, and [`Error::InvalidStrides`] if an axis is given twice.
    pub fn permute(&self, axes: &[usize]) -> Result<Self> {
        crate::base::same("rank of a permutation", self.shape.rank(), axes.len())?;
        let mut seen = [false; MAX_RANK];
        let (mut shape, mut strides) = (self.shape, self.strides);
        for (to, &from) in axes.iter().enumerate() {
            let n = *self.shape.get(from).ok_or(Error::range("axis", from, self.shape.rank()))?;
            if std::mem::replace(&mut seen[from], true) {
                return Err(Error::InvalidStrides {
                    what: "permutation",
                    reason: format!("axis {from} twice"),
                });
            }
            (shape[to], strides[to]) = (n, self.strides[from]);
        }
        Ok(Self { shape, strides, ..self.clone() })
    }
}

/// Returns the address of element `at` of a storage, or an error if the element starts inside a byte.
fn whole_bytes(storage: &Arc<dyn Storage>, dtype: DType, at: usize) -> Result<u64> {
    let bits = product("bits of a view", &[at, dtype.bits()])?;
    let address = storage.address() + (bits / 8) as u64;
    if bits.is_multiple_of(8) { Ok(address) } else { Err(Error::InsideByte { what: "an element", address }) }
}
