//! The wgpu backend: any GPU with Vulkan, Metal or DirectX 12, and software adapters.
//!
//! Memory consists of `wgpu` buffers, kernels are WGSL compute shaders, and all streams share the device's
//! only queue. The host sees results only after a wait.
//!
//! ```text
//! stream    `impl Stream`: the only caller of `kernels::lower`
//! kernels/  operations lowered to runs of kernels; `attend/` divides attention, in plans that layers share
//! queue/    what a stream has recorded: runs of kernels, uploads, reads, submissions
//! memory    storages: own, lent and reserved buffers
//! device    an opened device: its health, compiled kernels, tables of angles
//! pipeline  compiled kernels by shader and constants
//! adapter   the adapters of the machine, and the choice among them
//! options   settings of a backend
//! shaders/  the WGSL of the kernels
//! ```
//!
//! # Rows that share a word
//! Buffers are arrays of 32-bit words, and rows of 16-bit, 8-bit or 4-bit elements may begin and end inside a
//! word. A word that a row fills completely is stored. In a shared word, atomic operations clear and set only
//! the row's own bits, so threads that own other bits of the word lose nothing. (Reading, changing and
//! writing back the whole word loses bits: it gave wrong results in each of fifty trials.)
//!
//! # Large pools
//! A device can bind only part of a buffer at once: `max_storage_buffer_binding_size`, often 128 MiB to 4
//! GiB. A kernel that uses a larger buffer runs once for each window of the buffer that it touches, and
//! attention merges the results of all windows. A storage is one buffer of at most `max_buffer_size` bytes; a
//! larger allocation fails with an error that names this limit.
//!
//! # Limits of the interface
//! wgpu cannot reserve addresses. A [reserved](kvcore::Backend::reserve) storage frees its memory only when
//! its last mapped part is unmapped. The storage's address is an index, and views of the storage stay valid.
//! `pinned` and `system` memory need an adapter that binds host memory (`MAPPABLE_PRIMARY_BUFFERS`).
//!
//! ```
//! use kvbackend_wgpu::WgpuBackend;
//! use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
//!
//! # if kvbackend_wgpu::adapters().is_empty() {
//! #     return Ok(kvconform::skip(kvbackend_wgpu::NO_ADAPTER));
//! # }
//! let backend = WgpuBackend::new()?;
//! let stream = backend.stream()?;
//! let tensor = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2])?;
//! stream.write(&tensor, &[0, 0, 128, 63, 0, 0, 0, 64])?; // 1.0, 2.0
//! let mut bytes = [0; 8];
//! stream.read(&tensor, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 128, 63, 0, 0, 0, 64]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod adapter;
mod device;
mod kernels;
mod memory;
mod options;
mod pipeline;
mod queue;
mod stream;

use std::sync::Arc;

use kvcore::{
    Backend, Capabilities, CounterSnapshot, DType, KvFormat, MemoryKind, ReservedStorage, Result, Storage,
    Stream,
};

use device::{GpuDevice, NAME};

pub use adapter::{AdapterReport, NO_ADAPTER, adapters};
pub use memory::WgpuStorage;
pub use options::WgpuOptions;
pub use stream::{WgpuEvent, WgpuStream};
pub use wgpu;

/// The backend for a device that wgpu can use.
#[derive(Debug)]
pub struct WgpuBackend {
    device: Arc<GpuDevice>,
}

impl WgpuBackend {
    /// Creates a backend on the first usable adapter: a discrete GPU, or else an integrated GPU, or else any
    /// other adapter, such as a software adapter.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if no adapter is usable. The error explains what to do.
    pub fn new() -> Result<Arc<Self>> {
        Self::with_options(&WgpuOptions::default())
    }

    /// Creates a backend with the given options.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if the adapter does not exist, lacks a feature that the kernels
    /// need, or cannot be opened.
    pub fn with_options(options: &WgpuOptions) -> Result<Arc<Self>> {
        let (handle, queue) = adapter::open(options)?;
        Ok(Arc::new(Self { device: GpuDevice::new(handle, queue, options) }))
    }

    /// Creates a backend on a device that the caller has opened, for engines that use wgpu themselves.
    ///
    /// The caller should open the device with the limits of its adapter, and with `SHADER_F16`, `SHADER_I16`
    /// and `MAPPABLE_PRIMARY_BUFFERS` if the adapter has them. The backend replaces the device's handlers for
    /// errors and device loss. Each device must be given to only one backend.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::NoDevice`] if one of the device's limits is too low for the kernels.
    pub fn from_device(handle: wgpu::Device, queue: wgpu::Queue, options: &WgpuOptions) -> Result<Arc<Self>> {
        if let Some(reason) = adapter::unfit(&handle.limits()) {
            let reason = format!("{reason}; open it with its adapter's limits");
            return Err(kvcore::Error::NoDevice { backend: NAME, reason });
        }
        Ok(Arc::new(Self { device: GpuDevice::new(handle, queue, options) }))
    }

    /// Creates a storage over a buffer of this device that the caller owns.
    ///
    /// While the storage lives, the caller must order its own use of the buffer with the streams, and must
    /// not create a second storage over it, because two storages count as separate memory.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if the buffer lacks one of the usages `STORAGE`, `COPY_SRC` and
    /// `COPY_DST`, [`kvcore::Error::Zero`] if it is empty, and [`kvcore::Error::Misaligned`] if its length is
    /// not a multiple of 4.
    pub fn storage(&self, buffer: wgpu::Buffer, kind: MemoryKind) -> Result<WgpuStorage> {
        WgpuStorage::lent(&self.device, buffer, kind)
    }

    /// Returns the device, for engines that also use it directly.
    pub fn device(&self) -> &wgpu::Device {
        &self.device.handle
    }

    /// Returns the device's queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.device.queue
    }
}

impl Backend for WgpuBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> String {
        format!("{NAME} ({})", self.device.handle.adapter_info().name)
    }

    fn capabilities(&self) -> Capabilities {
        let host = self.device.features.contains(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS);
        let mut memory = vec![MemoryKind::Device];
        memory.extend(host.then_some([MemoryKind::Pinned, MemoryKind::System]).into_iter().flatten());
        Capabilities {
            dtypes: DType::COMPUTE.to_vec(),
            formats: KvFormat::QUANTIZED.to_vec(),
            memory,
            missing: vec!["graphs"],
        }
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(WgpuStorage::allocate(&self.device, kind, bytes)?))
    }

    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        Ok(Arc::new(WgpuStorage::reserve(&self.device, kind, bytes)?))
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        self.device.check()?;
        Ok(Arc::new(WgpuStream::new(Arc::clone(&self.device))))
    }

    fn counters(&self) -> CounterSnapshot {
        self.device.counters.snapshot()
    }
}
