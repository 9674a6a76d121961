//! Tensors in the form that operators expect: an address, an element type, extents and strides.

use std::ffi::c_void;
use std::sync::Arc;

use kvcore::{DType, Result, TensorView};
use smallvec::{SmallVec, smallvec};

use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::unsupported;

/// The alignment that operators require for a tensor's address, in bytes.
const ALIGN: u64 = 32;

/// The extents or strides of all axes.
pub(crate) type TensorAxes = SmallVec<[i64; 6]>;

/// A view of device memory. Strides are in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tensor {
    address: u64,
    dtype: sys::aclDataType,
    dims: TensorAxes,
    strides: TensorAxes,
}

/// Returns ACL's constant for an element type.
///
/// # Errors
/// Returns [`kvcore::Error::Unsupported`] if operators do not support the type.
pub(crate) fn number(dtype: DType) -> Result<sys::aclDataType> {
    match dtype {
        DType::F32 => Ok(sys::ACL_FLOAT),
        DType::F16 => Ok(sys::ACL_FLOAT16),
        DType::BF16 => Ok(sys::ACL_BF16),
        other => Err(unsupported(format!("arithmetic in {other}"))),
    }
}

/// Returns the size of an element in bytes.
pub(crate) fn bytes_of(dtype: sys::aclDataType) -> usize {
    match dtype {
        sys::ACL_INT64 => 8,
        sys::ACL_FLOAT | sys::ACL_INT32 => 4,
        sys::ACL_FLOAT16 | sys::ACL_BF16 | sys::ACL_INT16 => 2,
        _ => 1,
    }
}

impl Tensor {
    /// Creates a dense tensor at an address.
    pub(crate) fn dense(address: u64, dtype: sys::aclDataType, dims: &[usize]) -> Self {
        let dims: TensorAxes = dims.iter().map(|&n| n as i64).collect();
        let mut strides: TensorAxes = smallvec![1; dims.len()];
        for axis in (1..dims.len()).rev() {
            strides[axis - 1] = strides[axis] * dims[axis].max(1);
        }
        Self { address, dtype, dims, strides }
    }

    /// Creates a tensor with the given strides, in elements.
    pub(crate) fn strided(address: u64, dtype: sys::aclDataType, dims: &[usize], strides: &[usize]) -> Self {
        let axes = |axes: &[usize]| axes.iter().map(|&n| n as i64).collect();
        Self { address, dtype, dims: axes(dims), strides: axes(strides) }
    }

    /// Converts a view to the form that operators expect.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if operators do not support the view's type.
    pub(crate) fn of(view: &TensorView) -> Result<Self> {
        let dtype = number(view.dtype())?;
        let at = view.storage().address() + (view.offset() * bytes_of(dtype)) as u64;
        Ok(Self::strided(at, dtype, view.shape(), view.strides()))
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn dtype(&self) -> sys::aclDataType {
        self.dtype
    }

    /// Returns the extent of an axis.
    pub(crate) fn dim(&self, axis: usize) -> usize {
        self.dims[axis] as usize
    }

    pub(crate) fn dims(&self) -> SmallVec<[usize; 6]> {
        self.dims.iter().map(|&n| n as usize).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.dims.contains(&0)
    }

    /// Returns whether the elements are contiguous and in row-major order.
    pub(crate) fn is_dense(&self) -> bool {
        let mut expected = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == expected;
            expected *= n;
            fits
        })
    }

    /// Returns the number of elements from the first through the last, including gaps.
    pub(crate) fn span(&self) -> usize {
        let last: i64 =
            self.dims.iter().zip(&self.strides).map(|(&n, &stride)| (n - 1).max(0) * stride).sum();
        last as usize + 1
    }

    /// Returns the same view at another address.
    pub(crate) fn moved(&self, address: u64) -> Self {
        Self { address, dims: self.dims.clone(), strides: self.strides.clone(), ..*self }
    }

    /// Returns the tensor with its axes in the given order.
    pub(crate) fn permuted(&self, axes: &[usize]) -> Self {
        let pick = |of: &TensorAxes| axes.iter().map(|&axis| of[axis]).collect();
        Self { dims: pick(&self.dims), strides: pick(&self.strides), ..*self }
    }

    /// Returns a view of `count` elements along an axis: `start`, `start + step`, ….
    pub(crate) fn stepped(&self, axis: usize, start: usize, count: usize, step: usize) -> Self {
        let mut view = self.clone();
        view.address += start as u64 * self.strides[axis] as u64 * bytes_of(self.dtype) as u64;
        view.dims[axis] = count as i64;
        view.strides[axis] *= step as i64;
        view
    }

    /// Returns a view of `count` elements along an axis, starting at `start`.
    pub(crate) fn sliced(&self, axis: usize, start: usize, count: usize) -> Self {
        self.stepped(axis, start, count, 1)
    }

    /// Returns a dense tensor over the same elements with the given extents. The tensor itself must be dense.
    pub(crate) fn reshaped(&self, dims: &[usize]) -> Self {
        debug_assert!(self.is_dense());
        debug_assert_eq!(self.dims.iter().product::<i64>(), dims.iter().product::<usize>() as i64);
        Self::dense(self.address, self.dtype, dims)
    }

    /// Creates a handle to pass the tensor to operators.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(crate) fn handle(&self, npu: &Arc<Npu>) -> Result<TensorHandle> {
        let bytes = bytes_of(self.dtype) as u64;
        // Operators require an aligned address, so the remainder of the address becomes an offset.
        let before = if (self.address % ALIGN).is_multiple_of(bytes) { self.address % ALIGN } else { 0 };
        let offset = (before / bytes) as i64;
        let storage = [offset + self.span() as i64];
        // SAFETY: the arrays have the given lengths; the call copies them.
        let raw = unsafe {
            npu.library.base.aclCreateTensor(
                self.dims.as_ptr(),
                self.dims.len() as u64,
                self.dtype,
                self.strides.as_ptr(),
                offset,
                sys::ACL_FORMAT_ND,
                storage.as_ptr(),
                storage.len() as u64,
                (self.address - before) as *mut c_void,
            )
        };
        if raw.is_null() {
            return Err(npu.error(sys::ACL_ERROR_INVALID_PARAM as i32));
        }
        Ok(TensorHandle { raw, npu: Arc::clone(npu) })
    }
}

/// A handle to a CANN tensor. Dropping it destroys the tensor, unless a list has taken it over.
pub(crate) struct TensorHandle {
    raw: *mut sys::aclTensor,
    npu: Arc<Npu>,
}

impl TensorHandle {
    pub(crate) fn raw(&self) -> *mut sys::aclTensor {
        self.raw
    }
}

/// A CANN list of one tensor. Dropping it destroys the list and its tensor.
pub(crate) struct TensorList {
    raw: *mut sys::aclTensorList,
    npu: Arc<Npu>,
}

impl TensorList {
    /// Creates a list of one tensor.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(crate) fn of(tensor: &Tensor, npu: &Arc<Npu>) -> Result<Self> {
        let mut handle = tensor.handle(npu)?;
        let tensors = [handle.raw.cast_const()];
        // SAFETY: the array contains one handle, which is alive.
        let raw = unsafe { npu.library.base.aclCreateTensorList(tensors.as_ptr(), 1) };
        if raw.is_null() {
            return Err(npu.error(sys::ACL_ERROR_INVALID_PARAM as i32));
        }
        // The list owns the tensor now.
        handle.raw = std::ptr::null_mut();
        Ok(Self { raw, npu: Arc::clone(npu) })
    }

    pub(crate) fn raw(&self) -> *mut sys::aclTensorList {
        self.raw
    }
}

impl Drop for TensorList {
    fn drop(&mut self) {
        // SAFETY: `aclCreateTensorList` created the list, and it is destroyed once, with its tensor.
        unsafe { self.npu.library.base.aclDestroyTensorList(self.raw) };
    }
}

impl Drop for TensorHandle {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        // SAFETY: `aclCreateTensor` created the tensor, and it is destroyed once.
        unsafe { self.npu.library.base.aclDestroyTensor(self.raw) };
    }
}
