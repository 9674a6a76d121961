//! Exports tensors of this module, for other libraries to use in place.

use std::sync::Arc;

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::producer::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use kvcore::{DType, TensorView};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::device::ArenaDevice;
use crate::error::CallError;

/// A tensor returned by this module. `numpy.from_dlpack` and `torch.from_dlpack` import it without a copy.
/// Its memory stays alive as long as this tensor or any imported one.
#[pyclass(frozen, name = "Tensor", module = "kvcache")]
pub(crate) struct PyTensor {
    view: TensorView,
    device: Arc<ArenaDevice>,
}

impl PyTensor {
    /// Wraps a view of a device's memory for Python. All work on the view must have finished.
    pub(crate) fn new(view: TensorView, device: &Arc<ArenaDevice>) -> Self {
        Self { view, device: Arc::clone(device) }
    }

    fn element(&self) -> PyResult<DLDataType> {
        match self.view.dtype() {
            DType::F32 => Ok(DLDataType::F32),
            DType::F16 => Ok(DLDataType::F16),
            DType::BF16 => Ok(DLDataType::BF16),
            other => Err(PyValueError::new_err(format!(
                "DLPack does not support the element type {}",
                other.name()
            ))),
        }
    }

    fn managed<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let view = &self.view;
        let start = if view.is_empty() {
            view.storage().address()
        } else {
            view.address(&vec![0; view.shape().len()]).map_err(CallError::from)?
        };
        let prepared = Dynamic::new(view.shape(), view.strides()).prepare_as::<M>();
        let prepared = prepared.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut tensor = prepared.initialize(Box::new(view.clone()));
        tensor.set_data(start as *mut _).set_device(self.device.number()).set_dtype(self.element()?);
        // SAFETY: `start` is the address of the first element on the device, and every element of the view is
        // inside its storage, which `TensorView` checks on creation. The tensor's context is a clone of the
        // view, which keeps the storage alive until the tensor is deleted. No flag is set, because the memory
        // may be written and other views may share it.
        Ok(unsafe { tensor.finish() })
    }
}

impl DlpackExporter for PyTensor {
    fn device(&self) -> DLDevice {
        self.device.number()
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, _: Python<'_>, _: &ExportRequest<'_>) -> PyResult<()> {
        // Every call waits for its work before it returns a tensor.
        Ok(())
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.managed()
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.managed()
    }
}

#[pymethods]
impl PyTensor {
    /// The shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.view.shape())
    }

    /// True if the elements are in row-major order without gaps.
    #[getter]
    fn is_contiguous(&self) -> bool {
        self.view.is_contiguous()
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        export_dlpack(self, py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        let device = self.device.number();
        (device.device_type.0, device.device_id)
    }

    fn __repr__(&self) -> String {
        format!("Tensor(shape={:?}, dtype={})", self.view.shape(), self.view.dtype().name())
    }
}
