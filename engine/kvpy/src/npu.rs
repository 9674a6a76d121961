//! Another engine's cache in an NPU's memory, described by the addresses of its tensors.
//!
//! NPU kernels cannot access host memory. Keys are therefore rotated on the CPU, and rows are copied through
//! pinned memory, a few hundred at a time.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvbackend_cpu::{
    CpuBackend, CpuStorage, ForeignCache, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape,
};
use kvcore::{
    Backend, BlockOrder, Gather, KvArena, KvLayout, KvShape, LayerRopes, MemoryKind, Operation, PlaneStrides,
    Scatter, SlotMapping, Storage, Stream, TensorView, WriteSlots, allocate_tensor,
};
use parking_lot::Mutex;

use crate::device::finished;
use crate::error::Result;

/// The number of rows to copy at a time.
const ROWS: usize = 256;

// Decision: docs/decisions/vllm.md#rows-reach-an-npu-through-the-cpu
/// The addresses of a layer's keys and of its values.
pub(crate) type PlaneAddresses = (u64, u64);

/// A cache on an NPU, with an arena per layer.
pub(crate) struct NpuCache {
    shape: ForeignShape,
    layers: Vec<KvArena>,
    stream: Arc<dyn Stream>,
    staging: Mutex<Staging>,
}

impl NpuCache {
    /// Describes a cache by the addresses of its layers, each `[num_blocks, block_size, heads, dim]` without
    /// gaps.
    ///
    /// # Safety
    /// Each address must be the address of a tensor of this shape on this device that lives as long as
    /// `owner`. Nothing else may use a slot during a copy to or from it.
    pub(crate) unsafe fn lent(
        device: usize,
        planes: &[PlaneAddresses],
        shape: ForeignShape,
        owner: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if planes.is_empty() {
            return Err(kvcore::Error::Zero { what: "layers" }.into());
        }
        let backend = AscendBackend::with_options(&AscendOptions { device, ..AscendOptions::default() })?;
        let row = shape.heads.checked_mul(shape.dim);
        let block = row.and_then(|row| row.checked_mul(shape.block_size));
        let overflow = kvcore::Error::Overflow { what: "extent of another engine's cache" };
        let (Some(row), Some(block)) = (row, block) else { return Err(overflow.into()) };
        let strides = PlaneStrides { layer: 0, block, head: shape.dim, token: row };
        let layout = Arc::new(KvLayout::with_strides(
            KvShape {
                num_layers: 1,
                num_blocks: shape.num_blocks,
                block_size: shape.block_size,
                k_heads: shape.heads,
                v_heads: shape.heads,
                k_dim: shape.dim,
                v_dim: shape.dim,
                format: shape.dtype.into(),
                order: BlockOrder::TokenMajor,
            },
            strides,
            strides,
        )?);
        let bytes = block.checked_mul(shape.num_blocks).ok_or(overflow)?;
        let bytes = shape.dtype.bytes_for(bytes)?;
        check_apart(planes, bytes)?;
        let lent = |address| -> kvcore::Result<Arc<dyn Storage>> {
            // SAFETY: the caller guarantees that the tensor at this address lives as long as `owner`.
            // `check_apart` has checked that no two tensors overlap.
            Ok(Arc::new(unsafe { backend.lent(address, bytes, Arc::clone(owner)) }?))
        };
        let arena = |&(k, v): &PlaneAddresses| KvArena::from_storage(lent(k)?, lent(v)?, Arc::clone(&layout));
        let layers = planes.iter().map(arena).collect::<kvcore::Result<Vec<_>>>()?;
        let staging = Mutex::new(Staging::new(&backend, &shape, layers.len())?);
        Ok(Self { stream: backend.stream()?, shape, layers, staging })
    }

    /// Returns the number of tokens per block.
    pub(crate) fn block_size(&self) -> usize {
        self.shape.block_size
    }

    /// Copies rows of an arena in host memory to the cache, like [`ForeignCache::load`].
    pub(crate) fn load(
        &self,
        host: &CpuBackend,
        arena: &KvArena,
        loads: &[ForeignLoad],
        ropes: &LayerRopes,
    ) -> Result<()> {
        for load in loads {
            same_length(&load.from, &load.to)?;
        }
        let written: Vec<&SlotMapping> = loads.iter().map(|load| &load.to).collect();
        self.shape.check_slots(&written, true)?;
        let staging = self.staging.lock();
        for load in loads {
            for (from, to) in load.from.chunks(ROWS).zip(load.to.chunks(ROWS)) {
                let load = ForeignLoad { from: from.to_vec().into(), to: places(from), delta: load.delta };
                staging.cache.load(host, arena, &[load], ropes)?;
                self.down(&staging, to)?;
            }
        }
        Ok(())
    }

    /// Copies rows of the cache to an arena in host memory, like [`ForeignCache::save`].
    pub(crate) fn save(
        &self,
        host: &CpuBackend,
        arena: &KvArena,
        to: &WriteSlots,
        from: &SlotMapping,
    ) -> Result<()> {
        same_length(from, to.mapping())?;
        self.shape.check_slots(&[from], false)?;
        let staging = self.staging.lock();
        for (index, rows) in from.chunks(ROWS).enumerate() {
            let first = index * ROWS;
            self.up(&staging, rows)?;
            staging.cache.save(host, arena, &to.part(first..first + rows.len())?, &places(rows))?;
        }
        Ok(())
    }

    /// Copies the first rows of the staging memory to the given slots of the cache, and waits for the copy.
    fn down(&self, staging: &Staging, slots: &[i64]) -> Result<()> {
        let slots = WriteSlots::unchecked(slots.to_vec());
        finished(self.stream.as_ref(), || {
            for (layer, arena) in self.layers.iter().enumerate() {
                let [k, v] = staging.device(slots.len())?;
                let [from_k, from_v] = staging.host(layer, slots.len())?;
                from_k.h2d(&k, self.stream.as_ref())?;
                from_v.h2d(&v, self.stream.as_ref())?;
                self.stream.run(Operation::Scatter(&Scatter::new(arena, 0, k, v, &slots)))?;
            }
            Ok(())
        })
    }

    /// Copies the given slots of the cache to the first rows of the staging memory, and waits for the copy.
    fn up(&self, staging: &Staging, slots: &[i64]) -> Result<()> {
        let slots = SlotMapping::from(slots.to_vec());
        finished(self.stream.as_ref(), || {
            for (layer, arena) in self.layers.iter().enumerate() {
                let [k, v] = staging.device(slots.len())?;
                let [to_k, to_v] = staging.host(layer, slots.len())?;
                let gather = Gather::new(arena, 0, slots.slots(), k.clone(), v.clone());
                self.stream.run(Operation::Gather(&gather))?;
                k.d2h(&to_k, self.stream.as_ref())?;
                v.d2h(&to_v, self.stream.as_ref())?;
            }
            Ok(())
        })
    }
}

/// Staging memory for `ROWS` rows: pinned memory for all layers, and device memory for one layer.
struct Staging {
    /// The pinned rows as a cache in host memory with one block.
    cache: ForeignCache,
    /// The same rows as a tensor, `[layers, 2, ROWS, heads, dim]`.
    pinned: TensorView,
    /// Device memory for one layer, `[2, ROWS, heads, dim]`.
    device: TensorView,
}

impl Staging {
    fn new(backend: &Arc<AscendBackend>, shape: &ForeignShape, layers: usize) -> Result<Self> {
        let (heads, dim, dtype) = (shape.heads, shape.dim, shape.dtype);
        let tensor = |kind, shape: &[usize]| allocate_tensor(backend.as_ref(), kind, dtype, shape);
        let pinned = tensor(MemoryKind::Pinned, &[layers, 2, ROWS, heads, dim])?;
        let device = tensor(MemoryKind::Device, &[2, ROWS, heads, dim])?;
        let memory = Arc::clone(pinned.storage());
        let start = NonNull::new(memory.address() as *mut u8)
            .ok_or(kvcore::Error::Zero { what: "address of pinned memory" })?;
        let (bytes, owner) = (memory.len(), Arc::new(Arc::clone(&memory)));
        // SAFETY: pinned memory has a host address, valid for the memory's length as long as `owner` holds
        // the memory, and the backend has cleared it. The CPU accesses it only after waiting for the stream,
        // and the stream only after the CPU's copy has returned.
        let storage: Arc<dyn Storage> =
            Arc::new(unsafe { CpuStorage::from_raw(start, bytes, MemoryKind::Pinned, owner) }?);
        let plane = ROWS * heads * dim;
        let at = |index: usize| ForeignPlane {
            storage: Arc::clone(&storage),
            start: index * plane,
            block: plane,
            head: dim,
            order: ForeignOrder::Rows { token: heads * dim },
        };
        let rows = ForeignShape { num_blocks: 1, block_size: ROWS, ..shape.clone() };
        let planes = (0..layers).map(|layer| [at(2 * layer), at(2 * layer + 1)]).collect();
        Ok(Self { cache: ForeignCache::new(rows, planes)?, pinned, device })
    }

    /// Returns the first rows of a layer's keys and values in pinned memory.
    fn host(&self, layer: usize, rows: usize) -> kvcore::Result<[TensorView; 2]> {
        planes(&self.pinned.select(0, layer)?, rows)
    }

    /// Returns the first rows of the keys and values on the device.
    fn device(&self, rows: usize) -> kvcore::Result<[TensorView; 2]> {
        planes(&self.device, rows)
    }
}

/// Returns the first rows of the keys and values in `[2, ROWS, heads, dim]`.
fn planes(both: &TensorView, rows: usize) -> kvcore::Result<[TensorView; 2]> {
    Ok([both.select(0, 0)?.slice(0, 0, rows)?, both.select(0, 1)?.slice(0, 0, rows)?])
}

/// Checks that no two planes of `bytes` bytes share memory.
fn check_apart(planes: &[PlaneAddresses], bytes: usize) -> Result<()> {
    let mut starts: Vec<u64> = planes.iter().flat_map(|&(k, v)| [k, v]).collect();
    starts.sort_unstable();
    match starts.windows(2).find(|pair| pair[1] - pair[0] < bytes as u64) {
        None => Ok(()),
        Some(pair) => {
            let reason = format!("planes at {:#x} and {:#x} share memory", pair[0], pair[1]);
            Err(kvcore::Error::InvalidStrides { what: "another engine's cache", reason }.into())
        }
    }
}

/// Returns the first slots of the staging memory, one for each entry of `rows`.
fn places(rows: &[i64]) -> SlotMapping {
    (0..rows.len() as i64).collect::<Vec<_>>().into()
}

fn same_length(read: &[i64], written: &[i64]) -> Result<()> {
    let (expected, got) = (read.len(), written.len());
    if expected == got {
        return Ok(());
    }
    Err(kvcore::Error::mismatch("slots to write", expected, got).into())
}
