//! Tensors from other libraries, used in place.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use dlpark::ffi::{DLDataTypeCode, DLDevice};
use dlpark::python::consumer::stream::cuda;
use dlpark::python::{DlpackStream, ImportRequest, StreamArg};
use kvcore::{DType, Dims, Storage, TensorView};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::device::ArenaDevice;
use crate::error::{CallError, Result};

/// A tensor from another library. Its memory stays alive as long as `storage`.
#[derive(Debug)]
pub(crate) struct ForeignTensor {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// The stride of each axis, in elements.
    pub(crate) strides: Vec<usize>,
    /// False if the owner marks the memory as read-only.
    writable: bool,
    start: NonNull<u8>,
    owner: Arc<dyn Any + Send + Sync>,
}

/// Keeps another library's managed tensor and its memory alive.
struct DlpackOwner(#[expect(dead_code, reason = "held for its Drop")] dlpark::AllocationDeleter);

// SAFETY: the deleter is called once, when the last holder is dropped. `DLPack` allows calling it on any
// thread; Python's own producers acquire the interpreter's lock in it.
unsafe impl Send for DlpackOwner {}
// SAFETY: a shared reference to a `DlpackOwner` does not give access to any data.
unsafe impl Sync for DlpackOwner {}

/// The handle of the stream that must wait for a producer's work.
struct Consumer(*mut c_void);

// SAFETY: the handle belongs to a live CUDA stream, kept by `ArenaDevice`, and follows the convention for
// CUDA devices.
unsafe impl DlpackStream for Consumer {
    fn as_python_arg(&self, _: Python<'_>, _: DLDevice) -> PyResult<StreamArg> {
        Ok(cuda(self.0))
    }
}

impl ForeignTensor {
    /// Imports a tensor on a device through `DLPack`, without a copy. The device's stream waits for work that
    /// the producer has enqueued.
    ///
    /// # Errors
    /// Returns a `TypeError` if the object is not a tensor or has another element type. Returns a
    /// `ValueError` if the tensor is on another device, has negative strides or has no elements.
    pub(crate) fn of(object: &Bound<'_, PyAny>, place: &ArenaDevice) -> PyResult<Self> {
        let stream = place.raw_stream().map(Consumer);
        let stream = stream.as_ref().map(|stream| stream as &dyn DlpackStream);
        let request = ImportRequest::new(object.as_borrowed())?;
        // Check the device first, because a producer on another device must not get this stream.
        place.check(request.device()?)?;
        let tensor = request.import(stream, None)?;
        let writable = !tensor.flags().contains(dlpark::DlpackFlags::READ_ONLY);
        let view = tensor.validate().map_err(|error| PyValueError::new_err(error.to_string()))?;
        place.check(view.device())?;
        let of_type = view.dtype();
        let dtype = match (of_type.code, of_type.bits, of_type.lanes) {
            (DLDataTypeCode::FLOAT, 32, 1) => DType::F32,
            (DLDataTypeCode::FLOAT, 16, 1) => DType::F16,
            (DLDataTypeCode::BFLOAT, 16, 1) => DType::BF16,
            (DLDataTypeCode::UINT | DLDataTypeCode::INT, 8, 1) => DType::U8,
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "kernels do not support the element type {of_type:?}"
                )));
            }
        };
        let counts = |values: &[i64], what: &str| -> PyResult<Vec<usize>> {
            let of = |&value: &i64| usize::try_from(value).map_err(|_| value);
            let counts = values.iter().map(of).collect::<Result<_, _>>();
            counts.map_err(|value| PyValueError::new_err(format!("the tensor has a {what} of {value}")))
        };
        let shape = counts(view.shape(), "size")?;
        let strides = view.strides_or_compact().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let strides = counts(&strides, "stride")?;
        if shape.contains(&0) {
            return Err(PyValueError::new_err(format!("the tensor has no elements: its shape is {shape:?}")));
        }
        let reach =
            |sum: usize, (n, stride): (&usize, &usize)| (n - 1).checked_mul(*stride)?.checked_add(sum);
        let elements = shape.iter().zip(&strides).try_fold(1, reach);
        let overflow = kvcore::Error::Overflow { what: "extent of a tensor" };
        let bytes = elements.ok_or(overflow).and_then(|n| dtype.bytes_for(n)).map_err(CallError::from)?;
        let start = view.data_ptr().cast_mut().cast::<u8>().wrapping_add(view.byte_offset() as usize);
        let Some(start) = NonNull::new(start) else {
            return Err(PyValueError::new_err("the tensor has no memory"));
        };
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(DlpackOwner(tensor.into_deleter()));
        // SAFETY: the producer guarantees that its tensor is at `start` with the shape and strides that were
        // checked, until `owner` is dropped. The Python caller guarantees that nothing else uses the elements
        // during a call, as each call's documentation requires.
        let storage = unsafe { place.lent(start, bytes, Arc::clone(&owner)) }?;
        Ok(Self { storage, dtype, shape, strides, writable, start, owner })
    }

    /// Imports a tensor like [`of`](Self::of), but for writing.
    ///
    /// # Errors
    /// Returns a `ValueError` for a read-only tensor, and the errors of `of`.
    pub(crate) fn of_written(object: &Bound<'_, PyAny>, place: &ArenaDevice) -> PyResult<Self> {
        let tensor = Self::of(object, place)?;
        if tensor.writable { Ok(tensor) } else { Err(PyValueError::new_err("the tensor is read-only")) }
    }

    /// Returns the memory after the first `elements` elements.
    pub(crate) fn after(&self, elements: usize, place: &ArenaDevice) -> Result<Arc<dyn Storage>> {
        let skipped = self.dtype.bytes_for(elements)?;
        let left = self.storage.len().checked_sub(skipped);
        let bytes = left.ok_or(kvcore::Error::Overflow { what: "extent of a tensor" })?;
        // SAFETY: `skipped` is at most the length of the storage, which starts at `start`.
        let start = unsafe { self.start.add(skipped) };
        // SAFETY: the `bytes` bytes at `start` end where the storage does, which is valid for as long as
        // `owner` lives. The Python caller guarantees that nothing else uses the elements during a call.
        unsafe { place.lent(start, bytes, Arc::clone(&self.owner)) }
    }

    /// Returns a view of the tensor, for reading.
    pub(crate) fn view(&self) -> PyResult<TensorView> {
        let view = || {
            let (shape, strides) = (Dims::new(&self.shape)?, Dims::new(&self.strides)?);
            TensorView::with_strides(Arc::clone(&self.storage), self.dtype, shape, strides, 0)
        };
        Ok(view().map_err(CallError::from)?)
    }
}

/// Imports a tensor and returns a view of it, for reading.
pub(crate) fn read(object: &Bound<'_, PyAny>, place: &ArenaDevice) -> PyResult<TensorView> {
    ForeignTensor::of(object, place)?.view()
}

/// Imports a tensor and returns a view of it, for writing.
///
/// # Errors
/// Returns the errors of [`ForeignTensor::of_written`].
pub(crate) fn written(object: &Bound<'_, PyAny>, place: &ArenaDevice) -> PyResult<TensorView> {
    ForeignTensor::of_written(object, place)?.view()
}

/// A list of integers, or a tensor of integers in host memory.
#[derive(Debug)]
pub(crate) struct Integers(pub(crate) Vec<i64>);

impl<'py> FromPyObject<'_, 'py> for Integers {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // `tolist` is much faster on arrays and tensors than a loop over their elements.
        let list = if object.hasattr("tolist")? { object.call_method0("tolist")? } else { object.to_owned() };
        Ok(Self(list.extract()?))
    }
}
