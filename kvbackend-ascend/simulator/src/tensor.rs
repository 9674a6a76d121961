//! Tensors, scalars and lists of numbers, in the form that operators expect.

use std::ffi::c_void;
use std::ops::Range;

use half::{bf16, f16};

use crate::state::{CallResult, call, lock, refuse};
use crate::types as sys;

/// The code for an invalid operator argument.
pub(crate) const INVALID: i32 = 161_002;
/// The code for a null operator argument.
pub(crate) const NULL: i32 = 161_001;

/// The required alignment of a tensor's memory, in bytes.
const ALIGN: u64 = 32;

/// A tensor, as described by the arguments of `aclCreateTensor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct View {
    /// Address of the first element of the view.
    pub(crate) at: u64,
    pub(crate) dtype: sys::aclDataType,
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    /// The rule that the tensor breaks, if there is one.
    pub(crate) wrong: Option<String>,
}

/// A number on the host that is passed to operators.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostNumber(pub(crate) f32);

/// Returns the size of an element in bytes.
pub(crate) fn size_of_type(dtype: sys::aclDataType) -> usize {
    match dtype {
        sys::ACL_INT64 => 8,
        sys::ACL_FLOAT | sys::ACL_INT32 => 4,
        sys::ACL_FLOAT16 | sys::ACL_BF16 | sys::ACL_INT16 => 2,
        _ => 1,
    }
}

impl View {
    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Returns the range of bytes from the first element through the last, or `None` if the view is empty.
    pub(crate) fn bytes(&self) -> Option<Range<u64>> {
        if self.len() == 0 {
            return None;
        }
        let last: usize = self.dims.iter().zip(&self.strides).map(|(n, stride)| (n - 1) * stride).sum();
        Some(self.at..self.at + ((last + 1) * size_of_type(self.dtype)) as u64)
    }

    /// Returns whether the elements are contiguous.
    pub(crate) fn is_dense(&self) -> bool {
        let mut expected = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == expected;
            expected *= n;
            fits
        })
    }

    /// Returns whether any two elements may share an address.
    pub(crate) fn overlaps_itself(&self) -> bool {
        let mut axes: Vec<(usize, usize)> =
            self.strides.iter().copied().zip(self.dims.iter().copied()).filter(|axis| axis.1 > 1).collect();
        axes.sort_unstable();
        let mut covered = 1;
        axes.into_iter().any(|(stride, n)| {
            let overlaps = stride < covered;
            covered += stride * (n - 1);
            overlaps
        })
    }
}

/// Reads element `i` of a row at an address, as f32.
///
/// # Safety
/// The element must be in live memory.
pub(crate) unsafe fn load(dtype: sys::aclDataType, at: *const u8, i: usize) -> f32 {
    match dtype {
        sys::ACL_FLOAT => at.cast::<f32>().add(i).read_unaligned(),
        sys::ACL_FLOAT16 => at.cast::<f16>().add(i).read_unaligned().to_f32(),
        sys::ACL_BF16 => at.cast::<bf16>().add(i).read_unaligned().to_f32(),
        sys::ACL_INT8 => f32::from(at.cast::<i8>().add(i).read()),
        sys::ACL_INT32 => at.cast::<i32>().add(i).read_unaligned() as f32,
        _ => f32::NAN,
    }
}

/// Writes element `i` of a row at an address, rounded to nearest even.
///
/// # Safety
/// The element must be in live memory.
pub(crate) unsafe fn store(dtype: sys::aclDataType, at: *mut u8, i: usize, x: f32) {
    match dtype {
        sys::ACL_FLOAT => at.cast::<f32>().add(i).write_unaligned(x),
        sys::ACL_FLOAT16 => at.cast::<f16>().add(i).write_unaligned(f16::from_f32(x)),
        sys::ACL_BF16 => at.cast::<bf16>().add(i).write_unaligned(bf16::from_f32(x)),
        sys::ACL_INT8 => at.cast::<i8>().add(i).write(x.round_ties_even() as i8),
        sys::ACL_INT32 => at.cast::<i32>().add(i).write_unaligned(x as i32),
        _ => {}
    }
}

/// Returns the rule that a tensor's arguments break, if there is one.
unsafe fn wrong(dims: &[i64], strides: &[i64], offset: i64, storage: &[i64], data: u64) -> Option<String> {
    if dims.is_empty() || dims.len() > 8 {
        return Some(format!("a tensor of rank {}", dims.len()));
    }
    if dims.iter().chain(strides).any(|&n| n < 0) || offset < 0 {
        return Some("negative extents, strides or offset".to_owned());
    }
    if !data.is_multiple_of(ALIGN) {
        return Some(format!("the address {data:#x} is not a multiple of {ALIGN}"));
    }
    let last: i64 = dims.iter().zip(strides).map(|(n, stride)| (n - 1).max(0) * stride).sum();
    let room: i64 = storage.iter().product();
    let empty = dims.contains(&0);
    (!empty && offset + last >= room).then(|| format!("element {} of a storage of {room}", offset + last))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateTensor(
    dims: *const i64,
    rank: u64,
    dtype: sys::aclDataType,
    strides: *const i64,
    offset: i64,
    _: sys::aclFormat,
    storage: *const i64,
    storage_rank: u64,
    data: *mut c_void,
) -> *mut sys::aclTensor {
    let slice = |at: *const i64, n: u64| std::slice::from_raw_parts(at, n as usize);
    let (dims, strides, storage) = (slice(dims, rank), slice(strides, rank), slice(storage, storage_rank));
    let mut state = lock();
    if state.controls.verdict("aclCreateTensor").is_some() {
        return std::ptr::null_mut();
    }
    let view = View {
        at: data as u64 + (offset.max(0) as usize * size_of_type(dtype)) as u64,
        dtype,
        dims: dims.iter().map(|&n| n.max(0) as usize).collect(),
        strides: strides.iter().map(|&n| n.max(0) as usize).collect(),
        wrong: wrong(dims, strides, offset, storage, data as u64),
    };
    let handle = state.handle();
    state.tensors.insert(handle, view);
    handle as *mut sys::aclTensor
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyTensor(tensor: *const sys::aclTensor) -> sys::aclnnStatus {
    call("aclDestroyTensor", |state| {
        if state.lists.values().flatten().any(|&listed| listed == tensor as u64) {
            // CANN would free the tensor twice, with undefined results, so all devices are lost.
            state
                .devices
                .iter_mut()
                .for_each(|device| device.lost = Some("a tensor of a list was destroyed".to_owned()));
            return refuse(INVALID, "a tensor that a list owns");
        }
        known(state.tensors.remove(&(tensor as u64)).is_some(), "tensor")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateTensorList(
    tensors: *const *const sys::aclTensor,
    count: u64,
) -> *mut sys::aclTensorList {
    let mut state = lock();
    let tensors = std::slice::from_raw_parts(tensors, count as usize).iter().map(|&at| at as u64);
    let tensors: Vec<u64> = tensors.collect();
    let known = tensors.iter().all(|tensor| state.tensors.contains_key(tensor));
    if state.controls.verdict("aclCreateTensorList").is_some() || !known {
        return std::ptr::null_mut();
    }
    let handle = state.handle();
    state.lists.insert(handle, tensors);
    handle as *mut sys::aclTensorList
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyTensorList(list: *const sys::aclTensorList) -> sys::aclnnStatus {
    call("aclDestroyTensorList", |state| {
        let tensors = state.lists.remove(&(list as u64));
        for tensor in tensors.iter().flatten() {
            state.tensors.remove(tensor);
        }
        known(tensors.is_some(), "list of tensors")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateScalar(value: *mut c_void, dtype: sys::aclDataType) -> *mut sys::aclScalar {
    let mut state = lock();
    if state.controls.verdict("aclCreateScalar").is_some() || value.is_null() {
        return std::ptr::null_mut();
    }
    let handle = state.handle();
    state.scalars.insert(handle, HostNumber(load(dtype, value.cast(), 0)));
    handle as *mut sys::aclScalar
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyScalar(scalar: *const sys::aclScalar) -> sys::aclnnStatus {
    call("aclDestroyScalar", |state| known(state.scalars.remove(&(scalar as u64)).is_some(), "scalar"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateIntArray(values: *const i64, count: u64) -> *mut sys::aclIntArray {
    let mut state = lock();
    if state.controls.verdict("aclCreateIntArray").is_some() {
        return std::ptr::null_mut();
    }
    let handle = state.handle();
    state.arrays.insert(handle, std::slice::from_raw_parts(values, count as usize).to_vec());
    handle as *mut sys::aclIntArray
}

#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyIntArray(array: *const sys::aclIntArray) -> sys::aclnnStatus {
    call("aclDestroyIntArray", |state| known(state.arrays.remove(&(array as u64)).is_some(), "array"))
}

fn known(removed: bool, what: &str) -> CallResult {
    if removed { Ok(()) } else { refuse(INVALID, format!("no such {what}, or destroyed before")) }
}
