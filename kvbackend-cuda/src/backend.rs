//! The backend for one device.

use std::any::Any;
use std::sync::Arc;

use kvcore::{
    Backend, Capabilities, CounterSnapshot, DType, KvFormat, MemoryKind, ReservedStorage, Result, Storage,
    Stream,
};

use crate::device::CudaDevice;
use crate::driver::NAME;
use crate::memory::{CudaReserved, CudaStorage};
use crate::options::CudaOptions;
use crate::queue::CudaStream;
use crate::tables::AngleTables;

/// The backend for one NVIDIA GPU.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) tables: Arc<AngleTables>,
}

impl CudaBackend {
    /// Creates a backend on the first device.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if there is no driver or no device, or if the first device cannot
    /// be used. The error explains what to do.
    pub fn new() -> Result<Arc<Self>> {
        Self::with_options(&CudaOptions::default())
    }

    /// Creates a backend with the given options.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if there is no driver, or if the device does not exist, is older
    /// than compute capability 8.0, or cannot be opened.
    pub fn with_options(options: &CudaOptions) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { device: CudaDevice::open(options)?, tables: Arc::default() }))
    }

    /// Creates a stream like [`stream`](Backend::stream), but returns the concrete type. Its
    /// [`raw`](CudaStream::raw) method returns the driver's stream, on which other libraries can enqueue
    /// work.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Device`] if the driver cannot create a stream.
    pub fn cuda_stream(&self) -> Result<Arc<CudaStream>> {
        Ok(Arc::new(CudaStream::new(&self.device, &self.tables)?))
    }

    /// Creates a storage over device or pinned memory that the caller allocated, for example for an engine's
    /// tensor. `owner` is dropped with the storage.
    ///
    /// # Safety
    /// `address` must be valid for `bytes` bytes for as long as `owner` lives. While the storage lives, the
    /// caller must order its own use of the memory with the streams, and lend each byte to only one
    /// storage. As an exception, if the keys and values of an arena alternate in memory, the arena's two
    /// storages may cover the same bytes.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Device`] if the driver has no memory at the address or the memory is on
    /// another device, [`kvcore::Error::TooLarge`] if the allocation is smaller than `bytes`, and
    /// [`kvcore::Error::Zero`] if `bytes` is 0.
    pub unsafe fn lent(
        &self,
        address: u64,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<CudaStorage> {
        // SAFETY: the caller guarantees that `address` is valid for `bytes` bytes while `owner` lives.
        unsafe { CudaStorage::lent(&self.device, address, bytes, owner) }
    }

    /// Wraps a stream that the caller created in the device's primary context. Operations are enqueued on it,
    /// in order with the caller's own work. `owner` is dropped with the stream.
    ///
    /// # Safety
    /// `stream` must be a driver stream that lives as long as `owner`.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::ForeignHandle`] if the stream belongs to another context.
    pub unsafe fn lent_stream(
        &self,
        stream: cudarc::driver::sys::CUstream,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<CudaStream> {
        // SAFETY: the caller guarantees that `stream` is a driver stream that lives as long as `owner`.
        unsafe { CudaStream::lent(&self.device, &self.tables, stream, owner) }
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> String {
        format!("{NAME} ({}, device {})", self.device.facts.name, self.device.ordinal)
    }

    fn capabilities(&self) -> Capabilities {
        let reserve = if self.device.facts.virtual_memory { None } else { Some("reserve") };
        Capabilities {
            dtypes: DType::COMPUTE.to_vec(),
            formats: KvFormat::QUANTIZED.to_vec(),
            memory: vec![MemoryKind::Device, MemoryKind::Pinned],
            missing: reserve.into_iter().collect(),
        }
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(CudaStorage::allocate(&self.device, kind, bytes)?))
    }

    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        Ok(Arc::new(CudaReserved::reserve(&self.device, kind, bytes)?))
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(self.cuda_stream()?)
    }

    fn counters(&self) -> CounterSnapshot {
        self.device.counters.snapshot()
    }
}
