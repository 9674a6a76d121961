//! The caches of other engines, and copies of rows between them and arenas.

use std::any::Any;
use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape};
use kvcore::{
    BlockOrder, Gather, KvArena, KvFormat, KvLayout, KvShape, LayerRopes, MemoryKind, Operation,
    PlaneStrides, Rotation, Scatter, SlotMapping, Storage, TensorView, WriteSlots, allocate_tensor,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::{ArenaDevice, finished, npu};
use crate::error::{CallError, Result};
use crate::names::dtype;
use crate::npu::{NpuCache, PlaneAddresses};
use crate::tensor::ForeignTensor;

/// Another engine's cache: the keys and values of each layer, in that engine's own memory.
#[pyclass(frozen, name = "ForeignCache", module = "kvcache")]
pub(crate) struct PyForeignCache(pub(crate) Foreign);

/// Another engine's cache, by the kind of its memory: host memory, with elements in any order; a GPU's
/// memory, with an arena per layer; or an NPU's memory.
pub(crate) enum Foreign {
    Host(kvbackend_cpu::ForeignCache),
    Device(Arc<ArenaDevice>, Vec<KvArena>),
    Npu(Box<NpuCache>),
}

/// Returns the strides of a tensor with `N` axes, in elements.
fn strides<const N: usize>(tensor: &ForeignTensor, what: &str) -> PyResult<[usize; N]> {
    let wrong =
        || PyValueError::new_err(format!("{what} has the shape {:?}; {N} axes are needed", tensor.shape));
    <[usize; N]>::try_from(tensor.strides.as_slice()).map_err(|_| wrong())
}

/// Returns three values for a layer in which a value follows each key: its shape, its strides for blocks,
/// heads and tokens, and the number of elements per key.
fn row_axes(tensor: &ForeignTensor) -> PyResult<(ForeignShape, [usize; 3], usize)> {
    let [block, head, token, element] = strides(tensor, "a layer")?;
    let both = tensor.shape[3];
    if element != 1 || !both.is_multiple_of(2) {
        let text = format!(
            "a row must be contiguous and contain a key and its value; the shape is {:?}",
            tensor.shape
        );
        return Err(PyValueError::new_err(text));
    }
    let shape = ForeignShape {
        num_blocks: tensor.shape[0],
        block_size: tensor.shape[2],
        heads: tensor.shape[1],
        dim: both / 2,
        dtype: tensor.dtype,
    };
    Ok((shape, [block, head, token], both / 2))
}

impl Foreign {
    /// Returns the number of tokens per block.
    pub(crate) fn block_size(&self) -> usize {
        match self {
            Self::Host(cache) => cache.shape().block_size,
            Self::Device(_, layers) => layers.first().map_or(1, |layer| layer.layout().shape().block_size),
            Self::Npu(cache) => cache.block_size(),
        }
    }

    /// Copies rows of an arena to the cache, rotating keys on the fly.
    pub(crate) fn load(&self, to: &ArenaSide<'_>, loads: &[ForeignLoad], ropes: &LayerRopes) -> Result<()> {
        let (device, layers) = match self {
            Self::Host(cache) => return Ok(cache.load(to.host()?, to.arena, loads, ropes)?),
            Self::Npu(cache) => return cache.load(to.host()?, to.arena, loads, ropes),
            Self::Device(device, layers) => (device, layers),
        };
        to.check(device, layers)?;
        let stream = device.stream();
        finished(stream, || {
            for load in loads.iter().filter(|load| !load.from.is_empty()) {
                let copy = StagedRows::new(device, to.arena, load.from.len())?;
                let slots = WriteSlots::unchecked(load.to.clone());
                for (layer, foreign) in layers.iter().enumerate() {
                    let mut gather = copy.gather(to.arena, layer, load.from.slots());
                    if load.delta != 0 {
                        let rope = ropes.layers().get(layer).ok_or_else(|| no_rope(layer, ropes))?;
                        gather.rotation = Some(Rotation { rope: Arc::clone(rope), delta: load.delta });
                    }
                    stream.run(Operation::Gather(&gather))?;
                    stream.run(Operation::Scatter(&copy.scatter(foreign, 0, &slots)))?;
                }
            }
            Ok(())
        })
    }

    /// Copies rows of the cache to the slots `to` of an arena, without rotating keys.
    pub(crate) fn save(&self, from: &ArenaSide<'_>, to: &WriteSlots, slots: &SlotMapping) -> Result<()> {
        let (device, layers) = match self {
            Self::Host(cache) => return Ok(cache.save(from.host()?, from.arena, to, slots)?),
            Self::Npu(cache) => return cache.save(from.host()?, from.arena, to, slots),
            Self::Device(device, layers) => (device, layers),
        };
        from.check(device, layers)?;
        let stream = device.stream();
        finished(stream, || {
            let copy = StagedRows::new(device, from.arena, slots.len())?;
            for (layer, foreign) in layers.iter().enumerate() {
                stream.run(Operation::Gather(&copy.gather(foreign, 0, slots.slots())))?;
                stream.run(Operation::Scatter(&copy.scatter(from.arena, layer, to)))?;
            }
            Ok(())
        })
    }
}

fn no_rope(layer: usize, ropes: &LayerRopes) -> kvcore::Error {
    kvcore::Error::OutOfRange { what: "layer", value: layer as i128, limit: ropes.layers().len() as i128 }
}

/// The arena that takes part in a copy, and its device.
pub(crate) struct ArenaSide<'a> {
    pub(crate) device: &'a Arc<ArenaDevice>,
    pub(crate) arena: &'a KvArena,
}

impl ArenaSide<'_> {
    fn host(&self) -> Result<&CpuBackend> {
        match &**self.device {
            ArenaDevice::Cpu(backend, _) => Ok(backend),
            ArenaDevice::Cuda(..) => Err(self.elsewhere("cpu")),
        }
    }

    fn elsewhere(&self, wanted: &str) -> CallError {
        let reason = format!("the arena is on {}", self.device.backend().description());
        kvcore::Error::Unsupported {
            backend: "kvcache",
            what: format!("a copy to or from a cache on {wanted}; {reason}"),
        }
        .into()
    }

    /// Checks that the cache is on the arena's device and has as many layers as the arena.
    fn check(&self, device: &Arc<ArenaDevice>, layers: &[KvArena]) -> Result<()> {
        if !Arc::ptr_eq(device, self.device) {
            return Err(self.elsewhere("a device"));
        }
        let (expected, got) = (self.arena.layout().shape().num_layers, layers.len());
        if expected != got {
            return Err(kvcore::Error::mismatch("layers of the cache", expected, got).into());
        }
        let memory = |of: &Arc<dyn Storage>| of.address()..of.address() + of.len() as u64;
        let own = || self.arena.storages().map(memory);
        let mut theirs = layers.iter().flat_map(KvArena::storages).map(memory);
        if theirs.any(|theirs| own().any(|own| own.start < theirs.end && theirs.start < own.end)) {
            let what = "the arena and another engine's cache";
            return Err(kvcore::Error::Aliased { what }.into());
        }
        Ok(())
    }
}

/// Device memory that holds one layer's rows during a copy.
struct StagedRows {
    k: TensorView,
    v: TensorView,
}

impl StagedRows {
    fn new(device: &ArenaDevice, arena: &KvArena, count: usize) -> Result<Self> {
        let shape = arena.layout().shape();
        let KvFormat::Dense(dtype) = shape.format else {
            return Err(kvcore::Error::InvalidFormat {
                format: shape.format,
                reason: "rows are dense".to_owned(),
            }
            .into());
        };
        let rows =
            |heads, dim| allocate_tensor(device.backend(), MemoryKind::Device, dtype, &[count, heads, dim]);
        Ok(Self { k: rows(shape.k_heads, shape.k_dim)?, v: rows(shape.v_heads, shape.v_dim)? })
    }

    fn gather(&self, arena: &KvArena, layer: usize, slots: &Arc<[i64]>) -> Gather {
        Gather::new(arena, layer, slots, self.k.clone(), self.v.clone())
    }

    fn scatter(&self, arena: &KvArena, layer: usize, slots: &WriteSlots) -> Scatter {
        Scatter::new(arena, layer, self.k.clone(), self.v.clone(), slots)
    }
}

#[pymethods]
impl PyForeignCache {
    /// Describes a cache with one tensor per layer, `[blocks, heads, block_size, 2 × head_dim]`. `order` is
    /// `"rows"` (each row is a key followed by its value; the other axes may have any strides), `"columns"`
    /// (within a block and head, keys as `[head_dim, block_size]`, then values as `[block_size, head_dim]`)
    /// or `"tiles"` (keys and values in tiles for a matrix unit). For a cache on a GPU, `order` must be
    /// `"rows"`.
    #[staticmethod]
    #[pyo3(signature = (layers, order, device = "cpu"))]
    fn interleaved(layers: Vec<Bound<'_, PyAny>>, order: &str, device: &str) -> PyResult<Self> {
        let device = ArenaDevice::open(device)?;
        if order == "rows" {
            return Self::of_rows(&layers, device);
        }
        if matches!(*device, ArenaDevice::Cuda(..)) {
            return Err(PyValueError::new_err(format!("order {order:?} is only for host memory; use rows")));
        }
        let orders = |dim| match order {
            "columns" => Ok([ForeignOrder::Columns, ForeignOrder::Rows { token: dim }]),
            "tiles" => Ok([ForeignOrder::KeyTiles, ForeignOrder::ValueTiles]),
            _ => Err(PyValueError::new_err(format!("unknown order {order:?}; use rows, columns or tiles"))),
        };
        Self::of_layers(&layers, |tensor| {
            let [block, head, token, element] = strides(tensor, "a layer")?;
            let (block_size, both) = (tensor.shape[2], tensor.shape[3]);
            if element != 1 || token != both || both % 2 != 0 {
                let text = format!("a block's head must be contiguous; the strides are {:?}", tensor.strides);
                return Err(PyValueError::new_err(text));
            }
            let (dim, [keys, values]) = (both / 2, orders(both / 2)?);
            let shape = ForeignShape {
                num_blocks: tensor.shape[0],
                block_size,
                heads: tensor.shape[1],
                dim,
                dtype: tensor.dtype,
            };
            let storage = &tensor.storage;
            let plane =
                |start, order| ForeignPlane { storage: Arc::clone(storage), start, block, head, order };
            Ok((shape, [plane(0, keys), plane(block_size * dim, values)]))
        })
    }

    /// Describes a cache with one tensor per layer and rows of `head_dim` elements. `axes` has one letter per
    /// axis, in order: k (keys and values), b (blocks), t (tokens), h (heads) and o (elements). For example,
    /// `"kbtho"` is `[2, blocks, block_size, heads, head_dim]`.
    #[staticmethod]
    fn rows(layers: Vec<Bound<'_, PyAny>>, axes: &str) -> PyResult<Self> {
        let unknown = || {
            PyValueError::new_err(format!("axes must be the letters k, b, t, h, o once each, not {axes:?}"))
        };
        let place = |letter| axes.find(letter).filter(|_| axes.len() == 5).ok_or_else(unknown);
        let [k, b, t, h, o] = [place('k')?, place('b')?, place('t')?, place('h')?, place('o')?];
        Self::of_layers(&layers, |tensor| {
            let strides: [usize; 5] = strides(tensor, "a layer")?;
            if tensor.shape[k] != 2 || strides[o] != 1 {
                let text = format!(
                    "keys and values need an axis of 2, rows a stride of 1; the shape is {:?}",
                    tensor.shape
                );
                return Err(PyValueError::new_err(text));
            }
            let shape = ForeignShape {
                num_blocks: tensor.shape[b],
                block_size: tensor.shape[t],
                heads: tensor.shape[h],
                dim: tensor.shape[o],
                dtype: tensor.dtype,
            };
            let plane = |start| ForeignPlane {
                storage: Arc::clone(&tensor.storage),
                start,
                block: strides[b],
                head: strides[h],
                order: ForeignOrder::Rows { token: strides[t] },
            };
            Ok((shape, [plane(0), plane(strides[k])]))
        })
    }

    /// Describes a cache in the memory of an NPU, `"ascend"` or `"ascend:N"`, by the addresses of each
    /// layer's keys and values. Each address must be the address of a tensor `[num_blocks, block_size,
    /// num_heads, head_dim]` without gaps. Rows can be copied only to and from arenas on the CPU.
    ///
    /// Addresses are not checked: each MUST be the address of a tensor of this shape that lives as long as
    /// `owner`.
    #[staticmethod]
    #[pyo3(signature = (planes, owner, *, num_blocks, block_size, num_heads, head_dim, dtype_name, device = "ascend"))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn lent(
        planes: Vec<PlaneAddresses>,
        owner: Py<PyAny>,
        num_blocks: usize,
        block_size: usize,
        num_heads: usize,
        head_dim: usize,
        dtype_name: &str,
        device: &str,
    ) -> PyResult<Self> {
        let device = npu(device)?;
        let shape = ForeignShape {
            num_blocks,
            block_size,
            heads: num_heads,
            dim: head_dim,
            dtype: dtype(dtype_name)?,
        };
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(owner);
        // SAFETY: the Python caller guarantees that the tensors have this shape and live as long as `owner`.
        // As each call's documentation requires, the caller also guarantees that nothing else uses the slots
        // during a copy.
        let cache = unsafe { NpuCache::lent(device, &planes, shape, &owner) }?;
        Ok(Self(Foreign::Npu(Box::new(cache))))
    }
}

impl PyForeignCache {
    /// Describes layers made of rows, in which a value follows each key.
    fn of_rows(layers: &[Bound<'_, PyAny>], device: Arc<ArenaDevice>) -> PyResult<Self> {
        let checked = described(layers, &device, |tensor| {
            let (shape, [block, head, token], dim) = row_axes(tensor)?;
            let order = ForeignOrder::Rows { token };
            let storage = &tensor.storage;
            let plane = |start| ForeignPlane { storage: Arc::clone(storage), start, block, head, order };
            Ok((shape, [plane(0), plane(dim)]))
        })?;
        if matches!(*device, ArenaDevice::Cpu(..)) {
            return Ok(Self(Foreign::Host(checked)));
        }
        let arena = |layer: &Bound<'_, PyAny>| -> PyResult<KvArena> {
            let tensor = ForeignTensor::of_written(layer, &device)?;
            let (shape, [block, head, token], dim) = row_axes(&tensor)?;
            let strides = PlaneStrides { layer: 0, block, head, token };
            let build = || -> Result<KvArena> {
                let layout = KvLayout::with_strides(
                    KvShape {
                        num_layers: 1,
                        num_blocks: shape.num_blocks,
                        block_size: shape.block_size,
                        k_heads: shape.heads,
                        v_heads: shape.heads,
                        k_dim: dim,
                        v_dim: dim,
                        format: shape.dtype.into(),
                        order: BlockOrder::TokenMajor,
                    },
                    strides,
                    strides,
                )?;
                let values = tensor.after(dim, &device)?;
                Ok(KvArena::from_storage(Arc::clone(&tensor.storage), values, Arc::new(layout))?)
            };
            Ok(build()?)
        };
        let arenas = layers.iter().map(arena).collect::<PyResult<Vec<_>>>()?;
        Ok(Self(Foreign::Device(device, arenas)))
    }

    fn of_layers(
        layers: &[Bound<'_, PyAny>],
        describe: impl Fn(&ForeignTensor) -> PyResult<(ForeignShape, [ForeignPlane; 2])>,
    ) -> PyResult<Self> {
        let host = ArenaDevice::open("cpu")?;
        Ok(Self(Foreign::Host(described(layers, &host, describe)?)))
    }
}

/// Describes the layers of a cache on any device, and checks that no two planes share an element.
fn described(
    layers: &[Bound<'_, PyAny>],
    device: &ArenaDevice,
    describe: impl Fn(&ForeignTensor) -> PyResult<(ForeignShape, [ForeignPlane; 2])>,
) -> PyResult<kvbackend_cpu::ForeignCache> {
    let mut all = Vec::with_capacity(layers.len());
    let mut first: Option<ForeignShape> = None;
    for layer in layers {
        let (shape, planes) = describe(&ForeignTensor::of_written(layer, device)?)?;
        match &first {
            Some(first) if *first != shape => {
                return Err(PyValueError::new_err(format!("layers differ: {first:?} and {shape:?}")));
            }
            _ => first = Some(shape),
        }
        all.push(planes);
    }
    let Some(shape) = first else {
        return Err(PyValueError::new_err("a cache needs at least one layer"));
    };
    Ok(kvbackend_cpu::ForeignCache::new(shape, all).map_err(CallError::from)?)
}
