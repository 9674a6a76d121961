//! The Ascend backend: NPUs of Huawei through CANN 8.0 or later.
//!
//! Nothing of CANN is needed to build: its libraries are loaded at run time, and every function is looked up by itself.
//! Without them, or without a device, [`AscendBackend::new`] returns [`kvcore::Error::NoDevice`], which says what was
//! tried. Operations are composed of CANN's operators; nothing is compiled for the device.
//!
//! ```
//! use kvbackend_ascend::AscendBackend;
//! use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
//!
//! # if let Err(reason) = AscendBackend::new() {
//! #     return Ok(kvconform::skip(reason));
//! # }
//! let backend = AscendBackend::new()?;
//! let stream = backend.stream()?;
//! let tensor = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2])?;
//! stream.write(&tensor, &[0, 0, 128, 63, 0, 0, 0, 64])?; // 1.0, 2.0
//! let mut bytes = [0; 8];
//! stream.read(&tensor, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 128, 63, 0, 0, 0, 64]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod bindings;
pub mod dense;
mod device;
mod hccl;
mod library;
mod memory;
mod operations;
mod operators;
mod options;
mod report;
mod stream;

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use kvcore::{
    Backend, Capabilities, CounterSnapshot, DType, MemoryKind, ReservedStorage, Result, Storage, Stream,
};

use device::Device;

pub use hccl::{HcclCommunicator, HcclId};
pub use library::Serves;
pub use memory::{AscendReserved, AscendStorage};
pub use options::AscendOptions;
pub use report::{DeviceReport, OperatorReport, devices, operators};
pub use stream::{AscendEvent, AscendStream};

/// Name of the backend in errors and on command lines.
pub(crate) const NAME: &str = "ascend";

/// A backend on one NPU.
#[derive(Debug)]
pub struct AscendBackend {
    device: Arc<Device>,
}

impl AscendBackend {
    /// Creates a backend on the first device.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if there is no CANN or no device; the error says what to do.
    pub fn new() -> Result<Arc<Self>> {
        Self::with_options(&AscendOptions::default())
    }

    /// Creates a backend with the given options.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if CANN lacks a function that operations need, if the device does not exist, or
    /// if it cannot be opened.
    pub fn with_options(options: &AscendOptions) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { device: Device::open(options)? }))
    }

    /// Creates a storage over device memory that the caller allocated, for example a tensor of the engine. `owner` is
    /// dropped with the storage.
    ///
    /// # Safety
    /// `address` is valid on the device for `bytes` bytes for as long as `owner` lives. While the storage lives, the caller
    /// orders its own use of the memory with the streams, and lends each byte to one storage only.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if the address or `bytes` is 0.
    pub unsafe fn lent(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<AscendStorage> {
        // SAFETY: the caller guarantees the same.
        unsafe { AscendStorage::lent(&self.device, address, bytes, owner) }
    }

    /// Creates a stream over a stream of ACL that the caller created on this device. Operations are enqueued there, in order
    /// with the caller's own work. `owner` is dropped with the stream.
    ///
    /// # Safety
    /// `stream` is a stream of this device that lives as long as `owner`.
    pub unsafe fn lent_stream(&self, stream: *mut c_void, owner: Arc<dyn Any + Send + Sync>) -> AscendStream {
        // SAFETY: the caller guarantees the same.
        unsafe { AscendStream::lent(&self.device, stream, owner) }
    }
}

impl Backend for AscendBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> String {
        format!("{NAME} ({}, device {})", self.device.library.processor(), self.device.ordinal)
    }

    fn capabilities(&self) -> Capabilities {
        let int8 = self.device.library.lacks_for(Serves::Int8Caches).is_empty().then_some("int8").into_iter();
        let lacks = |there: bool, name| (!there).then_some(name);
        let graphs = lacks(self.device.library.captures(), "graphs");
        let reserve = lacks(memory::maps(&self.device), "reserve");
        Capabilities {
            dtypes: DType::COMPUTE.to_vec(),
            formats: int8.collect(),
            memory: vec![MemoryKind::Device, MemoryKind::Pinned],
            missing: graphs.into_iter().chain(reserve).collect(),
        }
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(AscendStorage::allocate(&self.device, kind, bytes)?))
    }

    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        Ok(Arc::new(AscendReserved::reserve(&self.device, kind, bytes)?))
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(AscendStream::new(&self.device)?))
    }

    fn counters(&self) -> CounterSnapshot {
        self.device.counters.snapshot()
    }
}
