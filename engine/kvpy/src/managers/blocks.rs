//! `BlockManager`: blocks by ID.

use kvcore::{BlockId, TensorView};
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::{KvPair, OnDevice, place};
use crate::arena::shape;
use crate::error::CallError;
use crate::export::PyTensor;
use crate::pool::numbers;

/// A model's keys and values in blocks that are allocated and freed by ID. All layers share the block IDs.
///
/// Keys and values are `[num_kv_heads, tokens, head_dim]`, in the memory of the manager's device. Invalid IDs
/// are errors and change nothing.
#[pyclass(frozen, name = "BlockManager", module = "kvcache")]
pub(crate) struct PyBlockManager(pub(super) OnDevice<kvmanager::BlockManager>);

fn ids(blocks: Vec<u32>) -> Vec<BlockId> {
    blocks.into_iter().map(BlockId).collect()
}

/// Returns the first of the attributes `names` that `config` has and that is not `None`.
fn setting<'py>(config: &Bound<'py, PyAny>, names: &[&str]) -> PyResult<Bound<'py, PyAny>> {
    for name in names {
        if let Some(value) = config.getattr_opt(*name)?.filter(|value| !value.is_none()) {
            return Ok(value);
        }
    }
    Err(PyAttributeError::new_err(format!(
        "the configuration has none of the attributes {}",
        names.join(", ")
    )))
}

impl PyBlockManager {
    /// Returns all layers' K or V as `[num_layers, num_blocks, num_kv_heads, block_size, head_dim]`.
    fn storage(&self, of: impl FnOnce((TensorView, TensorView)) -> TensorView) -> PyResult<PyTensor> {
        let views = self.0.own.lock().arena().views();
        let view = views.and_then(|views| of(views).permute(&[0, 1, 3, 2, 4])).map_err(CallError::from)?;
        Ok(PyTensor::new(view, &self.0.device))
    }
}

#[pymethods]
impl PyBlockManager {
    /// Allocates `num_blocks` blocks of `block_size` tokens, each for all layers. `device` is `"cpu"`,
    /// `"cuda"` or `"cuda:N"`, or a torch device. `dtype` is `"float32"`, `"float16"` or `"bfloat16"`, or a
    /// `NumPy` or torch type.
    #[new]
    #[pyo3(signature = (num_layers, num_kv_heads, head_dim, block_size = 16, num_blocks = 256, device = None, dtype = None))]
    fn new(
        num_layers: usize,
        num_kv_heads: usize,
        head_dim: usize,
        block_size: usize,
        num_blocks: usize,
        device: Option<Bound<'_, PyAny>>,
        dtype: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (device, dtype) = place(device.as_ref(), dtype.as_ref())?;
        let shape = shape(num_layers, num_blocks, block_size, (num_kv_heads, head_dim), dtype);
        let manager = kvmanager::BlockManager::new(device.shared(), shape).map_err(CallError::from)?;
        Ok(Self(OnDevice::new(device, manager)))
    }

    /// Allocates the blocks for a model. `model_config` uses transformers' names: `num_hidden_layers`,
    /// `num_key_value_heads` (or `num_attention_heads`), and `head_dim` (or `hidden_size`). It may also use
    /// `num_layers` and `num_kv_heads`. `engine_config` must have `device` and `dtype`. Raises
    /// `AttributeError` if an attribute is missing.
    #[classmethod]
    #[pyo3(signature = (model_config, engine_config, block_size = 16, num_blocks = 256))]
    fn from_config(
        _: &Bound<'_, PyType>,
        model_config: &Bound<'_, PyAny>,
        engine_config: &Bound<'_, PyAny>,
        block_size: usize,
        num_blocks: usize,
    ) -> PyResult<Self> {
        let count = |names: &[&str]| -> PyResult<usize> { setting(model_config, names)?.extract() };
        let head_dim = match setting(model_config, &["head_dim"]) {
            Ok(dim) => dim.extract()?,
            Err(_) => count(&["hidden_size"])? / count(&["num_attention_heads"])?.max(1),
        };
        Self::new(
            count(&["num_layers", "num_hidden_layers"])?,
            count(&["num_kv_heads", "num_key_value_heads", "num_attention_heads"])?,
            head_dim,
            block_size,
            num_blocks,
            Some(setting(engine_config, &["device"])?),
            Some(setting(engine_config, &["dtype"])?),
        )
    }

    /// Allocates `num_blocks_needed` blocks, or none, and returns their IDs. Raises `KvCacheError`, a
    /// `RuntimeError`, if there are not enough free blocks. `seq_id` has no effect, because blocks are freed
    /// by ID.
    #[pyo3(signature = (num_blocks_needed, seq_id = -1), text_signature = "($self, num_blocks_needed, seq_id=-1)")]
    fn allocate_blocks(&self, num_blocks_needed: usize, seq_id: i64) -> PyResult<Vec<u32>> {
        let _ = seq_id;
        Ok(numbers(&self.0.own.lock().allocate(num_blocks_needed).map_err(CallError::from)?))
    }

    /// Frees all of `block_ids`, or none of them. Raises `KvCacheError` if a block is already free, occurs
    /// twice, or belongs to a sequence of a `PagedKVCache`.
    fn free_blocks(&self, block_ids: Vec<u32>) -> PyResult<()> {
        Ok(self.0.own.lock().free(&ids(block_ids)).map_err(CallError::from)?)
    }

    /// Writes `key` and `value`, both `[num_kv_heads, tokens, head_dim]`, to a block of one layer, starting
    /// at token `offset`. The tokens must fit in the block.
    fn write_kv(
        &self,
        py: Python<'_>,
        layer_idx: usize,
        block_id: u32,
        offset: usize,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (k, v) = self.0.rows(key, value)?;
        self.0.run(py, |own, stream| own.write(stream, layer_idx, BlockId(block_id), offset, &k, &v))
    }

    /// Copies the first `seq_len` tokens in the given blocks from one layer. Returns keys and values, both
    /// `[num_kv_heads, seq_len, head_dim]`.
    fn read_kv(
        &self,
        py: Python<'_>,
        layer_idx: usize,
        block_ids: Vec<u32>,
        seq_len: usize,
    ) -> PyResult<KvPair> {
        let blocks = ids(block_ids);
        self.0.pair(self.0.run(py, |own, stream| own.read(stream, layer_idx, &blocks, seq_len))?)
    }

    /// The keys of all blocks as a view, `[num_layers, num_blocks, num_kv_heads, block_size, head_dim]`.
    /// Nothing is copied.
    #[getter]
    fn k_storage(&self) -> PyResult<PyTensor> {
        self.storage(|(k, _)| k)
    }

    /// The values of all blocks as a view, `[num_layers, num_blocks, num_kv_heads, block_size, head_dim]`.
    /// Nothing is copied.
    #[getter]
    fn v_storage(&self) -> PyResult<PyTensor> {
        self.storage(|(_, v)| v)
    }

    /// Returns the number of free blocks.
    fn num_free_blocks(&self) -> usize {
        self.0.own.lock().counts().free
    }

    /// Returns the total number of tokens for which the blocks have room.
    fn max_tokens_supported(&self) -> usize {
        self.0.own.lock().max_tokens_supported()
    }

    /// Returns the size of the keys and values of all layers and blocks, in bytes.
    fn get_memory_usage(&self) -> usize {
        self.0.own.lock().memory_usage()
    }

    /// Frees all blocks that `allocate_blocks` returned. Sequences keep their blocks.
    fn reset(&self) {
        self.0.own.lock().reset();
    }
}
