//! Opens devices by name: the backends for arenas and models.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use dlpark::ffi::{DLDevice, DLDeviceType};
use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvbackend_cpu::{CpuBackend, CpuOptions, CpuStorage};
use kvbackend_cuda::{CudaBackend, CudaOptions, CudaStream};
use kvcore::{Backend, MemoryKind, Storage, Stream};
use kvmodel::dense::{AscendDense, ComputeType, CudaDense, Dense, HostDense};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;

use crate::error::{CallError, Result};

/// An arena's device, with the stream that runs its operations.
pub(crate) enum ArenaDevice {
    Cpu(Arc<CpuBackend>, Arc<dyn Stream>),
    Cuda(Arc<CudaBackend>, Arc<CudaStream>, i32),
}

/// The open devices, by process ID and name. They are shared, so that a call accepts memory from an earlier
/// call. A forked process opens devices again, because it does not have its parent's threads and contexts.
static OPENED: Mutex<BTreeMap<(u32, String), Arc<ArenaDevice>>> = Mutex::new(BTreeMap::new());

impl ArenaDevice {
    /// Returns the device named `cpu`, `cuda` or `cuda:N`. Opens it on first use.
    pub(crate) fn open(name: &str) -> PyResult<Arc<Self>> {
        let number = match parts(name) {
            ("cpu", None) => None,
            ("cuda", number) => Some(number.unwrap_or(0)),
            _ => return Err(unknown(name, "cpu, cuda or cuda:N")),
        };
        let mut opened = OPENED.lock();
        let name = number.map_or_else(|| "cpu".to_owned(), |number| format!("cuda:{number}"));
        let key = (std::process::id(), name);
        if let Some(device) = opened.get(&key) {
            return Ok(Arc::clone(device));
        }
        let device = Arc::new(Self::new(number)?);
        opened.insert(key, Arc::clone(&device));
        Ok(device)
    }

    /// Opens the NVIDIA GPU with this index, or the CPU if `number` is `None`.
    fn new(number: Option<usize>) -> Result<Self> {
        let Some(number) = number else {
            let backend = CpuBackend::new();
            let stream = backend.stream()?;
            return Ok(Self::Cpu(backend, stream));
        };
        let backend = cuda(number)?;
        let stream = backend.cuda_stream()?;
        Ok(Self::Cuda(backend, stream, number as i32))
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Self::Cpu(backend, _) => backend.as_ref(),
            Self::Cuda(backend, ..) => backend.as_ref(),
        }
    }

    /// Returns the backend as a shared pointer.
    pub(crate) fn shared(&self) -> Arc<dyn Backend> {
        match self {
            Self::Cpu(backend, _) => Arc::clone(backend) as Arc<dyn Backend>,
            Self::Cuda(backend, ..) => Arc::clone(backend) as Arc<dyn Backend>,
        }
    }

    /// Returns the stream as a shared pointer.
    pub(crate) fn shared_stream(&self) -> Arc<dyn Stream> {
        match self {
            Self::Cpu(_, stream) => Arc::clone(stream),
            Self::Cuda(_, stream, _) => Arc::clone(stream) as Arc<dyn Stream>,
        }
    }

    pub(crate) fn stream(&self) -> &dyn Stream {
        match self {
            Self::Cpu(_, stream) => stream.as_ref(),
            Self::Cuda(_, stream, _) => stream.as_ref(),
        }
    }

    /// Returns the kind of memory with this name: `device`, or `host` for host memory that the device can
    /// access.
    pub(crate) fn memory(&self, name: &str) -> PyResult<MemoryKind> {
        match (self, name) {
            (Self::Cpu(..), "device" | "host") => Ok(MemoryKind::System),
            (Self::Cuda(..), "device") => Ok(MemoryKind::Device),
            (Self::Cuda(..), "host") => Ok(MemoryKind::Pinned),
            _ => Err(PyValueError::new_err(format!("unknown memory {name:?}; use device or host"))),
        }
    }

    /// Returns the driver's handle of the stream, or `None` on a CPU. Other libraries can use the handle to
    /// order their work with the stream.
    pub(crate) fn raw_stream(&self) -> Option<*mut c_void> {
        match self {
            Self::Cpu(..) => None,
            Self::Cuda(_, stream, _) => Some(stream.raw().cast()),
        }
    }

    /// Returns the device in `DLPack`'s numbering.
    pub(crate) fn number(&self) -> DLDevice {
        match self {
            Self::Cpu(..) => DLDevice { device_type: DLDeviceType::CPU, device_id: 0 },
            Self::Cuda(_, _, number) => DLDevice { device_type: DLDeviceType::CUDA, device_id: *number },
        }
    }

    /// Checks that a tensor is on this device.
    pub(crate) fn check(&self, device: DLDevice) -> PyResult<()> {
        let own = self.number();
        let numbered = own.device_type != DLDeviceType::CPU;
        if device.device_type == own.device_type && (!numbered || device.device_id == own.device_id) {
            return Ok(());
        }
        let (at, here) = (name_of(device), name_of(own));
        Err(PyValueError::new_err(format!("the tensor is on {at}, but must be on {here}")))
    }

    /// Wraps another library's memory.
    ///
    /// # Safety
    /// `start` must be valid for `bytes` bytes on this device for as long as `owner` lives. Nothing else may
    /// use the bytes during an operation.
    pub(crate) unsafe fn lent(
        &self,
        start: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Storage>> {
        Ok(match self {
            // SAFETY: the caller guarantees the same conditions.
            Self::Cpu(..) => {
                Arc::new(unsafe { CpuStorage::from_raw(start, bytes, MemoryKind::System, owner) }?)
            }
            Self::Cuda(backend, ..) => {
                // SAFETY: the caller guarantees the same conditions.
                Arc::new(unsafe { backend.lent(start.as_ptr() as u64, bytes, owner) }?)
            }
        })
    }
}

/// Calls `enqueue` and waits for the work that it has enqueued, even if `enqueue` fails, because the operands
/// of that work may be freed after this call.
pub(crate) fn finished<T>(stream: &dyn Stream, enqueue: impl FnOnce() -> Result<T>) -> Result<T> {
    let enqueued = enqueue();
    let waited = stream.synchronize();
    let value = enqueued?;
    waited?;
    Ok(value)
}

fn name_of(device: DLDevice) -> String {
    match device.device_type {
        DLDeviceType::CPU => "cpu".to_owned(),
        DLDeviceType::CUDA => format!("cuda:{}", device.device_id),
        other => format!("device {} of DLPack device type {}", device.device_id, other.0),
    }
}

fn cuda(device: usize) -> Result<Arc<CudaBackend>> {
    Ok(CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() })?)
}

/// Splits a device's name into its kind and its index.
fn parts(name: &str) -> (&str, Option<usize>) {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    // If the index is malformed, the whole name is taken as the kind, which is unknown.
    number.parse().map_or((name, None), |number| (kind, name.contains(':').then_some(number)))
}

/// Returns the index of an NPU from its name, `ascend` or `ascend:N`.
pub(crate) fn npu(name: &str) -> PyResult<usize> {
    match parts(name) {
        ("ascend", number) => Ok(number.unwrap_or(0)),
        _ => Err(unknown(name, "ascend or ascend:N")),
    }
}

fn unknown(name: &str, known: &str) -> PyErr {
    PyValueError::new_err(format!("unknown device {name:?}; use {known}"))
}

/// A model's backend and its dense steps.
pub(crate) struct ModelDevice {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) dense: Arc<dyn Dense>,
}

/// Opens a model's device: `cpu`, `cuda`, `cuda:N`, `ascend` or `ascend:N`. If the libraries for the dense
/// steps are not found, those steps run on the host, and Python gets a warning.
///
/// # Errors
/// Returns `ValueError` if the device has dense steps of its own, which are exact, and `compute` is another type.
pub(crate) fn open_model(
    py: Python<'_>,
    name: &str,
    threads: Option<usize>,
    compute: ComputeType,
) -> PyResult<ModelDevice> {
    let (backend, dense): (Arc<dyn Backend>, kvmodel::Result<Arc<dyn Dense>>) = match parts(name) {
        ("cpu", None) => {
            let backend = host(threads)?;
            let dense = Arc::new(HostDense::on(&backend).with_compute(compute));
            (backend, Ok(dense))
        }
        ("cuda", number) => {
            let backend = cuda(number.unwrap_or(0))?;
            let dense = CudaDense::new(&backend).map(|dense| Arc::new(dense) as Arc<dyn Dense>);
            (backend, dense)
        }
        ("ascend", number) => {
            let options = AscendOptions { device: number.unwrap_or(0), ..AscendOptions::default() };
            let backend = AscendBackend::with_options(&options).map_err(CallError::from)?;
            let dense = AscendDense::new(&backend).map(|dense| Arc::new(dense) as Arc<dyn Dense>);
            (backend, dense)
        }
        _ => return Err(unknown(name, "cpu, cuda, cuda:N, ascend or ascend:N")),
    };
    match dense {
        Ok(_) if compute != ComputeType::Exact && parts(name).0 != "cpu" => {
            let text =
                format!("compute is \"{compute}\", which is for matrix products on the CPU; use \"exact\"");
            Err(PyValueError::new_err(text))
        }
        Ok(dense) => Ok(ModelDevice { backend, dense }),
        Err(kvmodel::Error::Core(kvcore::Error::NoDevice { reason, .. })) => {
            let text = format!("norms and matrix products run on the CPU, which is slow, because {reason}");
            let text = CString::new(text).unwrap_or_default();
            PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &text, 2)?;
            Ok(ModelDevice {
                backend,
                dense: Arc::new(HostDense::on(host(threads)?.as_ref()).with_compute(compute)),
            })
        }
        Err(other) => Err(CallError::from(other).into()),
    }
}

fn host(threads: Option<usize>) -> Result<Arc<CpuBackend>> {
    Ok(CpuBackend::with_options(&CpuOptions { threads, ..CpuOptions::default() })?)
}
