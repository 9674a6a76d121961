//! `KVCache` and `ReceivedMatrix`: the caches of pipeline ranks and how they are merged.

use kvcore::TensorView;
use kvmanager::{PrefillPlan, RankCache, ReceivedMatrix};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{OnDevice, place};
use crate::error::CallError;
use crate::export::PyTensor;
use crate::tensor::read;

/// The token axis of a tensor `[B, H, L, D]`.
const SEQUENCE: usize = 2;

/// The keys, or the values, of consecutive layers, in memory that is allocated once.
///
/// Tensors are `[B, H, L, D]` for a cache with one layer, and `[layers, B, H, L, D]` for more.
#[pyclass(frozen, name = "KVCache", module = "kvcache")]
pub(crate) struct PyKvCache(OnDevice<RankCache>);

impl PyKvCache {
    /// Converts a Python tensor to a view `[layers, B, H, L, D]`.
    fn take(&self, tensor: &Bound<'_, PyAny>) -> PyResult<TensorView> {
        let view = read(tensor, &self.0.device)?;
        if view.shape().len() == 4 { Ok(view.unsqueeze(0).map_err(CallError::from)?) } else { Ok(view) }
    }

    /// Passes a view `[layers, B, H, L, D]` to Python, without the first axis if the cache has one layer.
    fn give(&self, view: TensorView) -> PyResult<PyTensor> {
        let one = view.shape()[0] == 1;
        let view = if one { view.select(0, 0).map_err(CallError::from)? } else { view };
        Ok(PyTensor::new(view, &self.0.device))
    }
}

#[pymethods]
impl PyKvCache {
    /// Allocates an empty cache with `num_layers` layers, each `[batch_size, num_heads, max_length,
    /// head_dim]`. `device` and `dtype` are given as for `BlockManager`.
    #[new]
    #[pyo3(signature = (batch_size, num_heads, max_length, head_dim, *, num_layers = 1, device = None, dtype = None))]
    fn new(
        batch_size: usize,
        num_heads: usize,
        max_length: usize,
        head_dim: usize,
        num_layers: usize,
        device: Option<Bound<'_, PyAny>>,
        dtype: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (device, dtype) = place(device.as_ref(), dtype.as_ref())?;
        let shape = [num_layers, batch_size, num_heads, max_length, head_dim];
        let cache = RankCache::new(device.backend(), dtype, shape).map_err(CallError::from)?;
        Ok(Self(OnDevice::new(device, cache)))
    }

    /// The number of tokens that every layer holds.
    #[getter]
    fn current_length(&self) -> usize {
        self.0.own.lock().len()
    }

    /// The number of tokens that a layer can hold.
    #[getter]
    fn max_length(&self) -> usize {
        self.0.own.lock().capacity()
    }

    /// The number of layers.
    #[getter]
    fn num_layers(&self) -> usize {
        self.0.own.lock().num_layers()
    }

    /// Appends a tensor along the sequence axis, and returns all tokens so far as a view. Nothing is copied,
    /// and the view has gaps between heads until the cache is full; `get_data` returns contiguous memory.
    /// Raises `KvCacheError`, and leaves the cache unchanged, if a shape differs or there are more than
    /// `max_length` tokens.
    fn append_sequence(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<PyTensor> {
        let tensor = self.take(tensor)?;
        self.give(self.0.run(py, |own, stream| {
            own.append_sequence(stream, &[tensor])?;
            own.get_data()
        })?)
    }

    /// Merges the caches of all ranks, and returns all tokens so far like `append_sequence`.
    ///
    /// By default, merges by layer: `tensors[r]` contains the layers of rank `r` for the next tokens,
    /// `[layers of r, B, H, L, D]`, or `[B, H, L, D]` if the rank has one layer. The length grows by `L`,
    /// regardless of the number of ranks. After `expect_chunks`, the tensors are the pieces of the next
    /// chunk. With `dim=2`, merges along the sequence: every tensor must contain all layers of this cache,
    /// and the tensors are concatenated in order.
    ///
    /// The design that this method is based on always concatenates along the sequence. It would turn 7 tokens
    /// on each of 3 ranks into 21 tokens, although the ranks have different layers of the same 7 tokens.
    /// Raises `KvCacheError` if the layers or the shapes do not fit together, and `ValueError` for any other
    /// `dim`. In these cases, the cache is unchanged.
    #[pyo3(signature = (tensors, dim = None))]
    fn merge_from_ranks(
        &self,
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        dim: Option<usize>,
    ) -> PyResult<PyTensor> {
        if dim.is_some_and(|dim| dim != SEQUENCE) {
            return Err(PyValueError::new_err(
                "dim must be None, to merge by layer, or 2, along the sequence",
            ));
        }
        let tensors = tensors.iter().map(|tensor| self.take(tensor)).collect::<PyResult<Vec<_>>>()?;
        self.give(self.0.run(py, |own, stream| {
            match dim {
                None => own.merge_from_ranks(stream, &tensors)?,
                Some(_) => own.append_sequence(stream, &tensors)?,
            }
            own.get_data()
        })?)
    }

    /// Empties the cache and starts merging a prompt of `num_tokens` tokens. The prompt arrives in chunks of
    /// `chunk_length` tokens (the last may be shorter), and the layers are divided evenly among `num_stages`
    /// stages. `receive` accepts the pieces in any order. Raises `KvCacheError` if the prompt is longer than
    /// `max_length`.
    fn expect_chunks(&self, num_tokens: usize, chunk_length: usize, num_stages: usize) -> PyResult<()> {
        let mut own = self.0.own.lock();
        let plan = PrefillPlan::even(own.num_layers(), num_stages, num_tokens, chunk_length);
        Ok(plan.and_then(|plan| own.expect(plan)).map_err(CallError::from)?)
    }

    /// Receives a stage's piece of a chunk, `[layers of the stage, B, H, tokens of the chunk, D]`. Tokens
    /// become readable once all stages of their chunk and of all earlier chunks have arrived. Raises
    /// `KvCacheError` if the piece has already arrived or has the wrong shape.
    fn receive(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, chunk: usize, stage: usize) -> PyResult<()> {
        let piece = self.take(tensor)?;
        self.0.run(py, |own, stream| own.accept(stream, stage, chunk, &piece))
    }

    /// The received pieces of the last merge; `None` before the first `expect_chunks` and after `reset`.
    #[getter]
    fn cache_received_indicator(&self) -> Option<PyReceivedMatrix> {
        self.0.own.lock().received().cloned().map(|matrix| PyReceivedMatrix(Mutex::new(matrix)))
    }

    /// Returns all tokens so far, `[B, H, current_length, D]` or `[layers, B, H, current_length, D]`, in
    /// contiguous memory: the cache's own memory if the cache is full, otherwise a copy.
    fn get_data(&self, py: Python<'_>) -> PyResult<PyTensor> {
        let backend = self.0.device.backend();
        self.give(self.0.run(py, |own, stream| {
            let data = own.get_data()?;
            if data.is_empty() { Ok(data) } else { Ok(data.contiguous(backend, stream)?) }
        })?)
    }

    /// Removes all tokens and ends any merge. The memory stays allocated.
    fn reset(&self) {
        self.0.own.lock().reset();
    }
}

// Decision: docs/decisions/managers.md#the-received-matrix-answers-questions-and-is-not-a-tensor
/// A matrix `[num_chunks, num_stages]` that records which pieces of a merge have arrived. It is printed as a
/// table.
#[pyclass(frozen, name = "ReceivedMatrix", module = "kvcache")]
pub(crate) struct PyReceivedMatrix(Mutex<ReceivedMatrix>);

#[pymethods]
impl PyReceivedMatrix {
    /// Creates a matrix in which no piece has arrived.
    #[new]
    fn new(num_chunks: usize, num_stages: usize) -> PyResult<Self> {
        Ok(Self(Mutex::new(ReceivedMatrix::new(num_chunks, num_stages).map_err(CallError::from)?)))
    }

    /// The number of chunks and the number of stages.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        let matrix = self.0.lock();
        (matrix.num_chunks(), matrix.num_stages())
    }

    /// Records a piece as received. Raises `KvCacheError` if it is outside the matrix or was received before.
    fn record(&self, chunk: usize, stage: usize) -> PyResult<()> {
        Ok(self.0.lock().record(chunk, stage).map_err(CallError::from)?)
    }

    /// Returns whether a piece has arrived.
    fn is_received(&self, chunk: usize, stage: usize) -> PyResult<bool> {
        Ok(self.0.lock().is_received(chunk, stage).map_err(CallError::from)?)
    }

    /// Returns whether all stages of a chunk have arrived.
    fn is_chunk_complete(&self, chunk: usize) -> PyResult<bool> {
        Ok(self.0.lock().is_chunk_complete(chunk).map_err(CallError::from)?)
    }

    /// Returns whether all chunks of a stage have arrived.
    fn is_stage_complete(&self, stage: usize) -> PyResult<bool> {
        Ok(self.0.lock().is_stage_complete(stage).map_err(CallError::from)?)
    }

    /// Returns whether all pieces have arrived.
    fn is_complete(&self) -> bool {
        self.0.lock().is_complete()
    }

    /// The share of pieces that have arrived, from 0 to 1.
    #[getter]
    fn completion(&self) -> f64 {
        self.0.lock().completion()
    }

    /// Returns the missing pieces as pairs of chunk and stage, in order.
    fn missing(&self) -> Vec<(usize, usize)> {
        self.0.lock().missing().collect()
    }

    /// Returns the matrix as a list of rows: 1 for a piece that has arrived, 0 for a missing one.
    fn tolist(&self) -> Vec<Vec<u32>> {
        self.0.lock().rows().into_iter().map(|row| row.into_iter().map(u32::from).collect()).collect()
    }

    fn __str__(&self) -> String {
        self.0.lock().to_string()
    }
}
