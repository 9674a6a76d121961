//! Memory for keys and values on a device, and the operations on it.

use std::sync::Arc;

use kvbackend_cpu::ForeignLoad;
use kvcore::{
    Attend, BlockOrder, CopyBlocks, DType, Gather, KvArena, KvLayout, KvShape, MemoryKind, Operation,
    RotateKeys, Rotation, RowRotation, Scatter, WriteSlots,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::ArenaDevice;
use crate::error::{CallError, Result};
use crate::foreign::{ArenaSide, PyForeignCache};
use crate::names::dtype;
use crate::provide::provide;
use crate::rope::PyRopes;
use crate::runs::CacheRows;
use crate::segment::PyAttendWork;
use crate::table::{BlockPairs, Slots};
use crate::tensor::{Integers, read, written};

/// The keys and values of all layers, in blocks in a device's memory.
///
/// Operations return when they are done. Tensors are used in place: during a call, nothing else may use the
/// tensors' elements or the blocks that the call writes.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct Arena {
    device: Arc<ArenaDevice>,
    memory: KvArena,
}

/// Returns the shape of an arena, with `heads × dim` elements in each row of keys, and in each row of values.
pub(crate) fn shape(
    num_layers: usize,
    num_blocks: usize,
    block_size: usize,
    (heads, dim): (usize, usize),
    dtype: DType,
) -> KvShape {
    KvShape {
        num_layers,
        num_blocks,
        block_size,
        k_heads: heads,
        v_heads: heads,
        k_dim: dim,
        v_dim: dim,
        format: dtype.into(),
        order: BlockOrder::HeadMajor,
    }
}

impl Arena {
    /// Returns the device and the memory.
    pub(crate) fn parts(&self) -> (&Arc<ArenaDevice>, &KvArena) {
        (&self.device, &self.memory)
    }

    fn allocate(shape: KvShape, device: Arc<ArenaDevice>, kind: MemoryKind) -> Result<Self> {
        let layout = Arc::new(KvLayout::new(shape)?);
        let memory = KvArena::allocate(device.backend(), kind, layout)?;
        Ok(Self { device, memory })
    }

    /// Runs an operation without holding Python's lock, and waits until the operation is done.
    fn run(&self, py: Python<'_>, operation: Operation<'_>) -> PyResult<()> {
        let run = || {
            self.device.stream().run(operation)?;
            self.device.stream().synchronize()
        };
        Ok(py.detach(run).map_err(CallError::from)?)
    }
}

#[pymethods]
impl Arena {
    /// Allocates `num_blocks` blocks on `device`: `"cpu"`, `"cuda"` or `"cuda:N"`. On a CPU, memory is only
    /// used up when blocks are first written. `memory` is `"device"` for the device's own memory, or `"host"`
    /// for host memory that the device can access.
    #[new]
    #[pyo3(signature = (*, num_layers, num_blocks, block_size, num_heads, head_dim, dtype_name, device = "cpu", memory = "device"))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        num_layers: usize,
        num_blocks: usize,
        block_size: usize,
        num_heads: usize,
        head_dim: usize,
        dtype_name: &str,
        device: &str,
        memory: &str,
    ) -> PyResult<Self> {
        let shape = shape(num_layers, num_blocks, block_size, (num_heads, head_dim), dtype(dtype_name)?);
        let device = ArenaDevice::open(device)?;
        let kind = device.memory(memory)?;
        Ok(Self::allocate(shape, device, kind)?)
    }

    /// Has the system provide an arena of a CPU now, and not when blocks are first written. What the blocks contain stays,
    /// and they may be used meanwhile. Does nothing to memory of other devices, or if the system refuses.
    fn provide(&self, py: Python<'_>) {
        if matches!(*self.device, ArenaDevice::Cpu(..)) {
            py.detach(|| self.memory.storages().for_each(|storage| provide(&**storage)));
        }
    }

    /// The size of a block in bytes, with the keys and values of all layers.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.memory.layout().block_bytes()
    }

    /// The number of blocks.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.memory.layout().shape().num_blocks
    }

    /// The number of tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.memory.layout().shape().block_size
    }

    /// Writes row `i` of `k` and `v`, both `[rows, heads, head_dim]`, to slot `slots[i]` of a layer. A row
    /// with a negative slot is skipped. With `ropes` and `positions`, each key is rotated to its position on
    /// the fly.
    #[pyo3(signature = (layer, k, v, slots, *, ropes = None, positions = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn scatter(
        &self,
        py: Python<'_>,
        layer: usize,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        slots: Slots,
        ropes: Option<&PyRopes>,
        positions: Option<Integers>,
    ) -> PyResult<()> {
        let mut scatter = Scatter::new(
            &self.memory,
            layer,
            read(k, &self.device)?,
            read(v, &self.device)?,
            &slots.writable(),
        );
        scatter.rotation = match (ropes, positions) {
            (None, None) => None,
            (Some(ropes), Some(positions)) => {
                Some(RowRotation { rope: ropes.layer(layer)?, positions: positions.0.into() })
            }
            _ => return Err(PyValueError::new_err("pass both ropes and positions, or neither")),
        };
        self.run(py, Operation::Scatter(&scatter))
    }

    /// Reads slot `slots[i]` of a layer into row `i` of `k` and `v`, both `[rows, heads, head_dim]`. A row
    /// with a negative slot is left unchanged. With `ropes`, keys are rotated by `distance` positions on the
    /// fly.
    #[pyo3(signature = (layer, slots, k, v, *, ropes = None, distance = 0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn gather(
        &self,
        py: Python<'_>,
        layer: usize,
        slots: Slots,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        ropes: Option<&PyRopes>,
        distance: i64,
    ) -> PyResult<()> {
        let mut gather = Gather::new(
            &self.memory,
            layer,
            slots.mapping().slots(),
            written(k, &self.device)?,
            written(v, &self.device)?,
        );
        if let Some(ropes) = ropes {
            gather.rotation = Some(Rotation { rope: ropes.layer(layer)?, delta: distance });
        }
        self.run(py, Operation::Gather(&gather))
    }

    /// Copies whole blocks of all layers. Each pair consists of the block to read and the block to write.
    fn copy(&self, py: Python<'_>, pairs: BlockPairs) -> PyResult<()> {
        let copy = CopyBlocks { arena: self.memory.clone(), pairs: pairs.0 };
        self.run(py, Operation::CopyBlocks(&copy))
    }

    /// Copies whole blocks of all layers, rotating keys by `distance` positions. Each pair consists of the
    /// block to read and the block to write.
    fn rotate(&self, py: Python<'_>, pairs: BlockPairs, ropes: &PyRopes, distance: i64) -> PyResult<()> {
        for layer in 0..self.memory.layout().shape().num_layers {
            let rotate = RotateKeys {
                src: self.memory.clone(),
                dst: self.memory.clone(),
                layer,
                pairs: pairs.0.clone(),
                rotation: Rotation { rope: ropes.layer(layer)?, delta: distance },
            };
            self.run(py, Operation::RotateKeys(&rotate))?;
        }
        Ok(())
    }

    /// Attends with `q`, `[rows, heads, head_dim]`, to the segments of `work`, and writes the result to
    /// `out`, which has the same shape. With `ropes`, queries are rotated to their positions on the fly.
    /// `ropes` is required if a segment is used at a different position than the one it was stored at. Keys
    /// are not rotated. `lse`, `[rows, heads]` in f32, receives the log-sum-exp of each row and head.
    #[pyo3(signature = (layer, q, work, out, *, ropes = None, scale = None, window = None, softcap = None, lse = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn attend(
        &self,
        py: Python<'_>,
        layer: usize,
        q: &Bound<'_, PyAny>,
        work: &PyAttendWork,
        out: &Bound<'_, PyAny>,
        ropes: Option<&PyRopes>,
        scale: Option<f32>,
        window: Option<usize>,
        softcap: Option<f32>,
        lse: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let plain =
            Attend::new(&self.memory, layer, read(q, &self.device)?, &work.0, written(out, &self.device)?);
        let attend = Attend {
            rope: ropes.map(|ropes| ropes.layer(layer)).transpose()?,
            scale: scale.unwrap_or(plain.scale),
            window,
            softcap,
            lse: lse.map(|lse| written(lse, &self.device)).transpose()?,
            ..plain
        };
        self.run(py, Operation::Attend(&attend))
    }

    /// Copies rows of all layers to another engine's cache. Each entry of `loads` consists of the rows to
    /// read, the rows to write, and the distance to rotate keys by. Rows are given either as `(blocks, first,
    /// count)`, for `count` tokens of these blocks starting at token `first`, or as a list of slots. Rows to
    /// write in a negative block, or with a negative slot, are skipped. Returns when the copies are done.
    /// Until then, nothing else may use the rows.
    fn load(
        &self,
        py: Python<'_>,
        cache: &PyForeignCache,
        loads: Vec<(CacheRows, CacheRows, i64)>,
        ropes: &PyRopes,
    ) -> PyResult<()> {
        let (own, other) = (self.block_size(), cache.0.block_size());
        let load = |(from, to, delta): (CacheRows, CacheRows, i64)| -> Result<ForeignLoad> {
            Ok(ForeignLoad { from: from.slots(own)?, to: to.slots(other)?, delta })
        };
        let loads = loads.into_iter().map(load).collect::<Result<Vec<_>>>()?;
        let memory = ArenaSide { device: &self.device, arena: &self.memory };
        Ok(py.detach(|| cache.0.load(&memory, &loads, &ropes.layers))?)
    }

    /// Copies rows of all layers from another engine's cache to rows `to` of this arena, with keys unchanged.
    /// Rows are given as in `load`. Returns when the copies are done. Until then, nothing else may write the
    /// rows.
    fn save(&self, py: Python<'_>, cache: &PyForeignCache, to: CacheRows, rows: CacheRows) -> PyResult<()> {
        let to = WriteSlots::unchecked(to.slots(self.block_size())?);
        let from = rows.slots(cache.0.block_size())?;
        let memory = ArenaSide { device: &self.device, arena: &self.memory };
        Ok(py.detach(|| cache.0.save(&memory, &to, &from))?)
    }
}
