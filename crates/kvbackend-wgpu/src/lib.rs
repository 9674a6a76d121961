//! The wgpu backend: any GPU with Vulkan, Metal or DirectX 12, and software that acts as one.
//!
//! Memory is `wgpu` buffers, kernels are WGSL compute shaders, and all streams share the device's one queue.
//! Nothing is visible to the host before a wait.
//!
//! # Rows that share a word
//! Buffers are arrays of 32-bit words, and rows of 16, 8 or 4-bit elements may begin and end inside one. A word
//! that a row fills wholly is stored; in a word that it shares, its bits alone are cleared and set by atomic
//! operations, so that threads that own other bits of it lose nothing. (Reading the word, changing it and
//! writing it back would: it was wrong in every one of fifty trials.)
//!
//! # Large pools
//! A device binds a part of a buffer at once: `max_storage_buffer_binding_size`, often 128 MiB to 4 GiB. Kernels
//! over a larger one run once for each window of it that they touch, and attention merges what it saw in each. A
//! storage is one buffer, at most `max_buffer_size`; a larger allocation is refused with that number.
//!
//! # What the interface cannot do
//! There is no reservation of addresses. A [reserved](kvcore::Backend::reserve) storage gives its memory back when
//! nothing of it is mapped any more, not by parts; its address is an index, so that views of it stay valid.
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
mod stream;

use std::sync::Arc;

use kvcore::backend::{Backend, Capabilities, CounterSnapshot, MemoryKind, ReservedStorage, Storage, Stream};
use kvcore::{DType, KvFormat, Result};

use device::Device;

pub use adapter::{AdapterReport, NO_ADAPTER, adapters};
pub use memory::WgpuStorage;
pub use options::WgpuOptions;
pub use stream::{WgpuEvent, WgpuStream};
pub use wgpu;

/// Name of this backend in errors and on command lines.
pub(crate) const NAME: &str = "wgpu";

/// A device that wgpu reaches.
#[derive(Debug)]
pub struct WgpuBackend {
    device: Arc<Device>,
}

impl WgpuBackend {
    /// A backend on the fastest adapter.
    ///
    /// # Errors
    /// [`kvcore::Error::NoDevice`], which says what to install.
    pub fn new() -> Result<Arc<Self>> {
        Self::with_options(&WgpuOptions::default())
    }

    /// A backend as `options` say.
    ///
    /// # Errors
    /// [`kvcore::Error::NoDevice`] for an adapter that is not there, lacks what the kernels need, or cannot be
    /// opened.
    pub fn with_options(options: &WgpuOptions) -> Result<Arc<Self>> {
        let (handle, queue) = adapter::open(options)?;
        Ok(Arc::new(Self { device: Device::new(handle, queue, options) }))
    }

    /// A backend on a device that the caller has opened, for engines that use wgpu themselves. It should be opened
    /// with the adapter's limits, and with `SHADER_F16`, `SHADER_I16` and `MAPPABLE_PRIMARY_BUFFERS` where there are any. Its
    /// handlers of errors and of loss are replaced, so that one device makes one backend.
    ///
    /// # Errors
    /// [`kvcore::Error::NoDevice`] for limits below what the kernels need.
    pub fn from_device(handle: wgpu::Device, queue: wgpu::Queue, options: &WgpuOptions) -> Result<Arc<Self>> {
        if let Some(reason) = adapter::unfit(&handle.limits()) {
            let reason = format!("{reason}; open it with its adapter's limits");
            return Err(kvcore::Error::NoDevice { backend: NAME, reason });
        }
        Ok(Arc::new(Self { device: Device::new(handle, queue, options) }))
    }

    /// A storage over the caller's buffer of this device. While the storage lives, the caller orders its own use of
    /// the buffer with the streams, and lends it once: two storages are taken for two pieces of memory.
    ///
    /// # Errors
    /// [`kvcore::Error::Unsupported`] for a buffer without the usages `STORAGE`, `COPY_SRC` and `COPY_DST`,
    /// [`kvcore::Error::Misaligned`] for one whose length is no multiple of 4.
    pub fn storage(&self, buffer: wgpu::Buffer, kind: MemoryKind) -> Result<WgpuStorage> {
        WgpuStorage::lent(&self.device, buffer, kind)
    }

    /// The device, for engines that use it beside this backend.
    pub fn device(&self) -> &wgpu::Device {
        &self.device.handle
    }

    /// Its queue.
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
            missing: Vec::new(),
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
