//! Storages: buffers that the backend creates, lent buffers, and reserved storages that can free their
//! buffers.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Error, MemoryKind, ReservedStorage, Result, Storage, check_granules};
use parking_lot::Mutex;
use wgpu::{Buffer, BufferUsages, CommandEncoderDescriptor, Features};

use crate::device::{GpuDevice, NAME};

/// The usages that kernels and copies require of a buffer.
const USAGES: BufferUsages =
    BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

/// The size of a granule, the unit in which reserved memory is mapped, in bytes.
const GRANULE: usize = 64 << 10;

/// A range of device memory, or of host memory that the device can bind.
///
/// The storage's address is an index that is unique in the process; it does not point to memory.
pub struct WgpuStorage {
    device: Arc<GpuDevice>,
    /// The buffer, or `None` while a reserved storage is unmapped.
    buffer: Mutex<Option<Buffer>>,
    kind: MemoryKind,
    address: u64,
    len: usize,
    /// For each granule of a reserved storage, true if the granule is mapped. Empty for other storages.
    granules: Mutex<Vec<bool>>,
}

impl fmt::Debug for WgpuStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuStorage({} bytes of {} memory, number {:#x})", self.len, self.kind, self.address)
    }
}

impl WgpuStorage {
    pub(crate) fn allocate(device: &Arc<GpuDevice>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of an allocation" });
        }
        let buffer = create(device, kind, bytes)?;
        Ok(Self::new(device, Some(buffer), kind, bytes, Vec::new()))
    }

    // Decision: docs/decisions/backend-wgpu.md#reserved-memory-is-released-as-a-whole
    pub(crate) fn reserve(device: &Arc<GpuDevice>, kind: MemoryKind, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of a reservation" });
        }
        let len = bytes
            .checked_next_multiple_of(GRANULE)
            .ok_or(Error::Overflow { what: "bytes of a reservation" })?;
        let buffer = create(device, kind, len)?;
        Ok(Self::new(device, Some(buffer), kind, len, vec![true; len / GRANULE]))
    }

    pub(crate) fn lent(device: &Arc<GpuDevice>, buffer: Buffer, kind: MemoryKind) -> Result<Self> {
        if !buffer.usage().contains(USAGES) {
            return Err(Error::Unsupported {
                backend: NAME,
                what: format!("a buffer for {:?}; it must be created for {USAGES:?}", buffer.usage()),
            });
        }
        let len = buffer.size() as usize;
        if len == 0 {
            return Err(Error::Zero { what: "bytes of a lent buffer" });
        }
        match len % 4 {
            0 => Ok(Self::new(device, Some(buffer), kind, len, Vec::new())),
            _ => Err(Error::Misaligned { what: "the end of a lent buffer", address: len as u64, align: 4 }),
        }
    }

    fn new(
        device: &Arc<GpuDevice>,
        buffer: Option<Buffer>,
        kind: MemoryKind,
        len: usize,
        granules: Vec<bool>,
    ) -> Self {
        let (device, address) = (Arc::clone(device), GpuDevice::address(len));
        Self { device, buffer: Mutex::new(buffer), kind, address, len, granules: Mutex::new(granules) }
    }

    /// Returns the buffer. Its length is at least the storage's length, and a multiple of 4 bytes.
    pub(crate) fn buffer(&self) -> Result<Buffer> {
        self.buffer.lock().clone().ok_or_else(|| Error::Device {
            backend: NAME,
            reason: "the memory of a storage is not mapped; map it first".to_owned(),
        })
    }
}

// Decision: docs/decisions/backend-wgpu.md#kernels-bind-host-memory-directly
/// Allocates a zeroed buffer.
fn create(device: &GpuDevice, kind: MemoryKind, bytes: usize) -> Result<Buffer> {
    let refused = |reason: String| Error::Allocation { bytes, kind, reason };
    let usage = match kind {
        MemoryKind::Device => USAGES,
        _ if device.features.contains(Features::MAPPABLE_PRIMARY_BUFFERS) => {
            USAGES | BufferUsages::MAP_READ | BufferUsages::MAP_WRITE
        }
        _ => {
            let what =
                format!("{kind} memory on this device, which cannot bind host memory; use device memory");
            return Err(Error::Unsupported { backend: NAME, what });
        }
    };
    device.check()?;
    let limit = device.limits.max_buffer_size;
    if bytes as u64 > limit {
        return Err(refused(format!(
            "the device's largest buffer has {limit} bytes; use fewer blocks, or several pools"
        )));
    }
    let size = (bytes as u64).next_multiple_of(16).min(limit - limit % 4);
    let descriptor =
        wgpu::BufferDescriptor { label: Some("storage"), size, usage, mapped_at_creation: false };
    if size < bytes as u64 {
        return Err(refused(format!("the device's largest buffer has {limit} bytes; use fewer blocks")));
    }
    device
        .guarded(|| device.handle.create_buffer(&descriptor))
        .map_err(|reason| device.no_memory(kind, bytes, reason))
}

impl Storage for WgpuStorage {
    fn len(&self) -> usize {
        self.len
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// wgpu cannot free memory and keep its address. A storage therefore drops its buffer when its last mapped
/// granule is unmapped, and creates a new one when a granule is mapped again. While any granule is mapped,
/// the whole buffer stays.
impl ReservedStorage for WgpuStorage {
    fn granularity(&self) -> usize {
        GRANULE
    }

    fn map(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, GRANULE, self.len)?;
        let mut granules = self.granules.lock();
        let mut buffer = self.buffer.lock();
        let wanted = &mut granules[range.start / GRANULE..range.end / GRANULE];
        if wanted.iter().all(|mapped| *mapped) {
            return Ok(());
        }
        match &*buffer {
            None => *buffer = Some(create(&self.device, self.kind, self.len)?),
            Some(buffer) => {
                let device = &self.device;
                device.check()?;
                let clear = || {
                    let mut encoder =
                        device.handle.create_command_encoder(&CommandEncoderDescriptor::default());
                    for (i, _) in wanted.iter().enumerate().filter(|(_, mapped)| !**mapped) {
                        let at = (range.start + i * GRANULE) as u64;
                        encoder.clear_buffer(buffer, at, Some(GRANULE as u64));
                    }
                    device.queue.submit([encoder.finish()]);
                };
                device.guarded(clear).map_err(|reason| device.refusal(reason))?;
            }
        }
        wanted.fill(true);
        Ok(())
    }

    fn unmap(&self, range: Range<usize>) -> Result<()> {
        check_granules(&range, GRANULE, self.len)?;
        let mut granules = self.granules.lock();
        granules[range.start / GRANULE..range.end / GRANULE].fill(false);
        if granules.iter().all(|mapped| !mapped) {
            *self.buffer.lock() = None;
        }
        Ok(())
    }

    fn mapped_bytes(&self) -> usize {
        self.granules.lock().iter().filter(|mapped| **mapped).count() * GRANULE
    }

    /// Returns the whole length while any granule is mapped, because a buffer can only be freed as a whole.
    fn resident_bytes(&self) -> usize {
        if self.buffer.lock().is_some() { self.len } else { 0 }
    }
}

/// Downcasts a storage of this device to this backend's type.
///
/// # Errors
/// Returns [`Error::ForeignHandle`] if the storage belongs to another backend or device.
pub(crate) fn of<'a>(device: &Arc<GpuDevice>, storage: &'a Arc<dyn Storage>) -> Result<&'a WgpuStorage> {
    let known = storage.as_any().downcast_ref::<WgpuStorage>();
    known
        .filter(|known| Arc::ptr_eq(&known.device, device))
        .ok_or(Error::ForeignHandle { what: "a storage", backend: NAME })
}
