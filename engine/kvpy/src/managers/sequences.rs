//! `PagedKVCache` and `PagedKVCacheWrapper`: sequences by ID, in the blocks of a `BlockManager`.

use std::sync::Arc;

use kvmanager::PagedSequences;
use pyo3::prelude::*;

use super::{KvPair, OnDevice, PyBlockManager};
use crate::error::CallError;

/// Sequences in the blocks of a `BlockManager`, written layer by layer. Keys and values are `[num_kv_heads,
/// tokens, head_dim]`.
///
/// All layers of a sequence share its blocks. A sequence is as long as its longest layer. Invalid calls are
/// errors and change nothing.
#[pyclass(frozen, name = "PagedKVCache", module = "kvcache")]
pub(crate) struct PyPagedKvCache(OnDevice<PagedSequences>);

impl PyPagedKvCache {
    fn write(
        &self,
        py: Python<'_>,
        (seq_id, layer_idx): (u64, usize),
        (key, value): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
        start_pos: usize,
    ) -> PyResult<KvPair> {
        let (k, v) = self.0.rows(key, value)?;
        let update = |own: &mut PagedSequences, stream: &dyn kvcore::Stream| {
            own.update(stream, seq_id, layer_idx, &k, &v, start_pos)
        };
        self.0.pair(self.0.run(py, update)?)
    }
}

#[pymethods]
impl PyPagedKvCache {
    /// Creates an empty cache. Each sequence uses at most `max_blocks_per_seq` blocks, which it gets from
    /// `block_manager`.
    #[new]
    #[pyo3(signature = (block_manager, max_blocks_per_seq = 64))]
    fn new(block_manager: &PyBlockManager, max_blocks_per_seq: usize) -> PyResult<Self> {
        let sequences = PagedSequences::new(&block_manager.0.own.lock()).map_err(CallError::from)?;
        let sequences = sequences.max_blocks(max_blocks_per_seq);
        Ok(Self(OnDevice::new(Arc::clone(&block_manager.0.device), sequences)))
    }

    /// Creates an empty sequence and returns its ID: `seq_id`, or the largest ID in use plus 1. Raises
    /// `KvCacheError` if the ID is in use.
    #[pyo3(signature = (seq_id = None))]
    fn create_sequence(&self, seq_id: Option<u64>) -> PyResult<u64> {
        Ok(self.0.own.lock().create(seq_id).map_err(CallError::from)?)
    }

    /// Deletes a sequence and frees its blocks immediately.
    fn delete_sequence(&self, seq_id: u64) -> PyResult<()> {
        Ok(self.0.own.lock().delete(seq_id).map_err(CallError::from)?)
    }

    /// Appends `key` and `value`, both `[num_kv_heads, tokens, head_dim]`, to one layer. The first layer that
    /// receives a token allocates the token's slot, so the sequence's length grows once per token. Raises
    /// `KvCacheError` if there are too few blocks or the sequence would exceed its limit.
    fn append_kv(
        &self,
        py: Python<'_>,
        seq_id: u64,
        layer_idx: usize,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (k, v) = self.0.rows(key, value)?;
        self.0.run(py, |own, stream| own.append(stream, seq_id, layer_idx, &k, &v))
    }

    /// Copies all of a sequence's tokens from one layer. Returns keys and values, both `[num_kv_heads,
    /// tokens, head_dim]`.
    fn get_kv(&self, py: Python<'_>, seq_id: u64, layer_idx: usize) -> PyResult<KvPair> {
        self.0.pair(self.0.run(py, |own, stream| {
            let len = own.layer_len(seq_id, layer_idx)?;
            own.read(stream, seq_id, layer_idx, len)
        })?)
    }

    /// Returns the number of tokens in a sequence's longest layer.
    fn get_seq_len(&self, seq_id: u64) -> PyResult<usize> {
        Ok(self.0.own.lock().len(seq_id).map_err(CallError::from)?)
    }

    /// Writes `key` and `value` to one layer at `start_pos`, replacing all later tokens of the layer. Returns
    /// all tokens of the layer, like `get_kv`. Raises `KvCacheError` if `start_pos` would leave a gap.
    fn update(
        &self,
        py: Python<'_>,
        seq_id: u64,
        layer_idx: usize,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        start_pos: usize,
    ) -> PyResult<KvPair> {
        self.write(py, (seq_id, layer_idx), (key, value), start_pos)
    }
}

/// One sequence of a `PagedKVCache` with the interface of a dense cache.
#[pyclass(frozen, name = "PagedKVCacheWrapper", module = "kvcache")]
pub(crate) struct PyPagedKvCacheWrapper {
    cache: Py<PyPagedKvCache>,
    seq_id: u64,
}

#[pymethods]
impl PyPagedKvCacheWrapper {
    /// Wraps a sequence. Raises `KvCacheError` if there is no sequence with this ID.
    #[new]
    fn new(paged_cache: Py<PyPagedKvCache>, seq_id: u64) -> PyResult<Self> {
        paged_cache.get().get_seq_len(seq_id)?;
        Ok(Self { cache: paged_cache, seq_id })
    }

    /// Copies the first `seq_len` tokens of one layer. Returns keys and values, both `[num_kv_heads, seq_len,
    /// head_dim]`. Raises `KvCacheError` if the layer has fewer tokens.
    fn get_layer_kv(&self, py: Python<'_>, layer_idx: usize, seq_len: usize) -> PyResult<KvPair> {
        let cache = &self.cache.get().0;
        cache.pair(cache.run(py, |own, stream| own.read(stream, self.seq_id, layer_idx, seq_len))?)
    }

    /// Writes `key` and `value`, both `[num_kv_heads, tokens, head_dim]`, to one layer at `start_pos`, and
    /// returns all tokens of the layer, like `PagedKVCache.update`.
    fn update(
        &self,
        py: Python<'_>,
        layer_idx: usize,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        start_pos: usize,
    ) -> PyResult<KvPair> {
        self.cache.get().write(py, (self.seq_id, layer_idx), (key, value), start_pos)
    }
}
