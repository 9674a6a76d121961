//! Memory for keys and values on a device, and the operations on it.

use std::sync::Arc;

use kvbackend_cpu::ForeignLoad;
use kvcore::{
    Attend, BlockOrder, CopyBlocks, Gather, KvArena, KvLayout, KvShape, MemoryKind, Operation, RotateKeys,
    Rotation, RowRotation, Scatter, SlotMapping, WriteSlots,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::Device;
use crate::error::{Failure, Result};
use crate::foreign::{ForeignCache, Memory};
use crate::names::dtype;
use crate::rope::Ropes;
use crate::segment::AttendWork;
use crate::table::{Pairs, Slots};
use crate::tensor::{Integers, read, written};

/// Keys and values of all layers in blocks, in the memory of a device.
///
/// Operations return when they are done. Tensors are used where they lie; nobody else may use their elements, or the blocks that are
/// written, during a call.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct Arena {
    device: Arc<Device>,
    memory: KvArena,
}

/// Returns the shape of an arena whose keys and values have rows of the same `heads × dim`.
pub(crate) fn shape(
    num_layers: usize,
    num_blocks: usize,
    block_size: usize,
    (heads, dim): (usize, usize),
    dtype_name: &str,
) -> PyResult<KvShape> {
    Ok(KvShape {
        num_layers,
        num_blocks,
        block_size,
        k_heads: heads,
        v_heads: heads,
        k_dim: dim,
        v_dim: dim,
        format: dtype(dtype_name)?.into(),
        order: BlockOrder::HeadMajor,
    })
}

impl Arena {
    fn allocate(shape: KvShape, device: Arc<Device>, kind: MemoryKind) -> Result<Self> {
        let layout = Arc::new(KvLayout::new(shape)?);
        let memory = KvArena::allocate(device.backend(), kind, layout)?;
        Ok(Self { device, memory })
    }

    /// Runs an operation, and waits for it, without Python's lock.
    fn run(&self, py: Python<'_>, operation: Operation<'_>) -> PyResult<()> {
        let run = || {
            self.device.stream().run(operation)?;
            self.device.stream().synchronize()
        };
        Ok(py.detach(run).map_err(Failure::from)?)
    }
}

#[pymethods]
impl Arena {
    /// Allocates `num_blocks` blocks on `device`: `"cpu"`, whose memory is taken as it is first written, `"cuda"` or `"cuda:N"`. `memory` is
    /// the device's own, or that of the `"host"`, where a device reads and writes it, too.
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
        let shape = shape(num_layers, num_blocks, block_size, (num_heads, head_dim), dtype_name)?;
        let device = Device::open(device)?;
        let kind = device.memory(memory)?;
        Ok(Self::allocate(shape, device, kind)?)
    }

    /// The bytes of a block: keys and values of all layers.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.memory.layout().block_bytes()
    }

    /// The number of blocks.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.memory.layout().shape().num_blocks
    }

    /// The number of tokens in a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.memory.layout().shape().block_size
    }

    /// Writes row `i` of `k` and `v`, `[rows, heads, head_dim]` each, to slot `slots[i]` of a layer. A negative slot is skipped.
    /// With `ropes` and `positions`, each key is rotated to its position on the way.
    #[pyo3(signature = (layer, k, v, slots, *, ropes = None, positions = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn scatter(
        &self,
        py: Python<'_>,
        layer: usize,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        slots: Slots,
        ropes: Option<&Ropes>,
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
            _ => return Err(PyValueError::new_err("keys are rotated by ropes and positions together")),
        };
        self.run(py, Operation::Scatter(&scatter))
    }

    /// Reads slot `slots[i]` of a layer into row `i` of `k` and `v`, `[rows, heads, head_dim]` each. A row with a negative slot is left
    /// as it is. With `ropes`, keys are rotated by `distance` positions on the way.
    #[pyo3(signature = (layer, slots, k, v, *, ropes = None, distance = 0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn gather(
        &self,
        py: Python<'_>,
        layer: usize,
        slots: Slots,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        ropes: Option<&Ropes>,
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

    /// Copies whole blocks of all layers, for pairs of a block to read and a block to write.
    fn copy(&self, py: Python<'_>, pairs: Pairs) -> PyResult<()> {
        let copy = CopyBlocks { arena: self.memory.clone(), pairs: pairs.0 };
        self.run(py, Operation::CopyBlocks(&copy))
    }

    /// Copies whole blocks of all layers, keys rotated by `distance` positions, for pairs of a block to read and a block to write.
    fn rotate(&self, py: Python<'_>, pairs: Pairs, ropes: &Ropes, distance: i64) -> PyResult<()> {
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

    /// Attends with `q`, `[rows, heads, head_dim]`, to the segments of `work`, and writes `out`, of the same shape. With `ropes`, queries
    /// are rotated to their positions on the way; segments that are used at another place than they were stored at need that. Keys
    /// do not move. `lse`, `[rows, heads]` in f32, takes the log-sum-exp of each row and head.
    #[pyo3(signature = (layer, q, work, out, *, ropes = None, scale = None, window = None, softcap = None, lse = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn attend(
        &self,
        py: Python<'_>,
        layer: usize,
        q: &Bound<'_, PyAny>,
        work: &AttendWork,
        out: &Bound<'_, PyAny>,
        ropes: Option<&Ropes>,
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

    /// Copies rows of all layers to another engine's slots: `loads` are lists of slots to read, of slots to write (a negative one is
    /// skipped), and the distance that keys are rotated by. Returns when it is done. Nobody may use the slots meanwhile.
    fn load(
        &self,
        py: Python<'_>,
        cache: &ForeignCache,
        loads: Vec<(Vec<i64>, Vec<i64>, i64)>,
        ropes: &Ropes,
    ) -> PyResult<()> {
        let load = |(from, to, delta): (Vec<i64>, Vec<i64>, i64)| ForeignLoad {
            from: from.into(),
            to: to.into(),
            delta,
        };
        let loads: Vec<_> = loads.into_iter().map(load).collect();
        let memory = Memory { device: &self.device, arena: &self.memory };
        Ok(py.detach(|| cache.0.load(&memory, &loads, &ropes.layers))?)
    }

    /// Copies rows of all layers from another engine's slots to slots of this arena, keys as they are. Returns when it is done. Nobody
    /// may write the slots meanwhile.
    fn save(&self, py: Python<'_>, cache: &ForeignCache, to: Vec<i64>, slots: Vec<i64>) -> PyResult<()> {
        let (to, from) = (WriteSlots::unchecked(to), SlotMapping::from(slots));
        let memory = Memory { device: &self.device, arena: &self.memory };
        Ok(py.detach(|| cache.0.save(&memory, &to, &from))?)
    }
}
