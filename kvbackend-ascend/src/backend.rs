//! The backend: memory and streams of one NPU.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use kvcore::{
    Backend, Capabilities, CounterSnapshot, DType, MemoryKind, ReservedStorage, Result, Storage, Stream,
};

use crate::dense::AscendDenseSteps;
use crate::device::Npu;
use crate::errors::NAME;
use crate::library::Serves;
use crate::memory::{AscendReserved, AscendStorage, maps};
use crate::options::AscendOptions;
use crate::queue::AclStream;
use crate::stream::AscendStream;

/// The backend for one NPU.
#[derive(Debug)]
pub struct AscendBackend {
    pub(crate) npu: Arc<Npu>,
}

impl AscendBackend {
    /// Creates a backend on the first device.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if there is no CANN or no device, or if the first device cannot be
    /// used. The error explains what to do.
    pub fn new() -> Result<Arc<Self>> {
        Self::with_options(&AscendOptions::default())
    }

    /// Creates a backend with the given options.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if CANN is missing or lacks a function that operations need, or if
    /// the device does not exist or cannot be opened.
    pub fn with_options(options: &AscendOptions) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { npu: Npu::open(options)? }))
    }

    /// Creates a storage over device memory that the caller allocated, for example for an engine's tensor.
    /// `owner` is dropped with the storage.
    ///
    /// # Safety
    /// `address` must be valid on the device for `bytes` bytes for as long as `owner` lives. While the
    /// storage lives, the caller must order its own use of the memory with the streams, and lend each byte to
    /// only one storage.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if `address` or `bytes` is 0.
    pub unsafe fn lent(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<AscendStorage> {
        // SAFETY: the caller guarantees that `address` is valid for `bytes` bytes while `owner` lives.
        unsafe { AscendStorage::lent(&self.npu, address, bytes, owner) }
    }

    /// Wraps an ACL stream that the caller created on this device. Operations are enqueued on this stream, in
    /// order with the caller's own work. `owner` is dropped with the stream.
    ///
    /// # Safety
    /// `stream` must be a stream of this device that lives as long as `owner`.
    pub unsafe fn lent_stream(&self, stream: *mut c_void, owner: Arc<dyn Any + Send + Sync>) -> AscendStream {
        // SAFETY: the caller guarantees that `stream` is a stream of this device that lives as long as
        // `owner`.
        unsafe { AscendStream::lent(&self.npu, stream, owner) }
    }
}

impl Backend for AscendBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> String {
        format!("{NAME} ({}, device {})", self.npu.library.processor(), self.npu.ordinal)
    }

    fn capabilities(&self) -> Capabilities {
        let int8 = self.npu.library.lacks_for(Serves::Int8Caches).is_empty().then_some("int8").into_iter();
        let missing = |present: bool, name| (!present).then_some(name);
        let graphs = missing(self.npu.library.captures(), "graphs");
        let reserve = missing(maps(&self.npu), "reserve");
        Capabilities {
            dtypes: DType::COMPUTE.to_vec(),
            formats: int8.collect(),
            memory: vec![MemoryKind::Device, MemoryKind::Pinned],
            missing: graphs.into_iter().chain(reserve).collect(),
        }
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(AscendStorage::allocate(&self.npu, kind, bytes)?))
    }

    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        Ok(Arc::new(AscendReserved::reserve(&self.npu, kind, bytes)?))
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(AscendStream::over(AclStream::new(&self.npu)?)))
    }

    fn counters(&self) -> CounterSnapshot {
        self.npu.counters.snapshot()
    }
}

impl AscendDenseSteps {
    /// Creates the dense steps for a backend's device, with their own stream.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if CANN lacks an operator that the steps need, or a device error.
    pub fn new(backend: &AscendBackend) -> Result<Self> {
        Self::check(&backend.npu)?;
        let stream = AscendStream::over(AclStream::new(&backend.npu)?);
        Ok(Self::over(&Arc::clone(stream.queue()), Arc::new(stream)))
    }
}
