//! The chunk cache: the chunks in an arena, and the reservations of requests that compute missing chunks.

use kvchunk::{Acquired, ChunkBlockPool, ChunkContext, ChunkHasher, ComputeMode, HashAlgorithm, TenantId};
use kvcore::{BlockKey, SlotMapping};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{CallError, KvCacheError, Result};
use crate::metrics::PyChunkCacheMetrics;
use crate::pool::numbers;
use crate::prompt::PyChunkHash;
use crate::segment::PySegment;
use crate::table::PyWriteSlots;

/// The settings of a chunk cache. Settings that are left out keep their defaults.
#[pyclass(frozen, name = "ChunkCacheConfig", module = "kvcache")]
pub(crate) struct PyChunkCacheConfig(pub(crate) kvchunk::ChunkCacheConfig);

#[pymethods]
impl PyChunkCacheConfig {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(py: Python<'_>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let json = py.import("json")?;
        let text: String = match settings {
            Some(settings) => json.call_method1("dumps", (settings,))?.extract()?,
            None => "{}".to_owned(),
        };
        let config: kvchunk::ChunkCacheConfig = serde_json::from_str(&text)
            .map_err(|error| PyValueError::new_err(format!("chunk cache settings: {error}")))?;
        config.check().map_err(CallError::from)?;
        Ok(Self(config))
    }

    /// Returns all settings by name.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text =
            serde_json::to_string(&self.0).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// A cache of chunks in blocks. It only tracks the blocks; their bytes may be anywhere, for example in the
/// arenas of several workers.
///
/// A chunk is looked up by its tokens and everything else that its bytes depend on. If a chunk is missing,
/// one request computes it, and other requests wait for that request.
#[pyclass(frozen, name = "ChunkCacheManager", module = "kvcache")]
pub(crate) struct PyChunkCacheManager(kvchunk::ChunkCacheManager);

/// A hold on a stored piece of a chunk. The piece is not overwritten or evicted until the hold is released or
/// dropped.
#[pyclass(frozen, name = "PieceHold", module = "kvcache")]
pub(crate) struct PyPieceHold(Mutex<Option<kvchunk::PieceHold>>);

/// Blocks for a missing piece of a chunk, which this request must compute. Dropping the reservation frees the
/// blocks.
#[pyclass(frozen, name = "ChunkReservation", module = "kvcache")]
pub(crate) struct PyChunkReservation {
    own: Mutex<Option<kvchunk::ChunkReservation>>,
    hash: kvchunk::ChunkHash,
    #[pyo3(get)]
    block_ids: Vec<u32>,
    #[pyo3(get)]
    num_tokens: usize,
    #[pyo3(get)]
    stored_start: i64,
}

/// A piece of a chunk that another request is computing.
#[pyclass(frozen, name = "ChunkWaiter", module = "kvcache")]
pub(crate) struct PyChunkWaiter {
    own: kvchunk::ChunkWaiter,
    hash: kvchunk::ChunkHash,
}

fn over() -> PyErr {
    PyRuntimeError::new_err("it was already released or stored")
}

#[pymethods]
impl PyPieceHold {
    /// The slot of each of the piece's tokens.
    #[getter]
    fn slots(&self) -> PyResult<Vec<i64>> {
        let own = self.0.lock();
        let hold = own.as_ref().ok_or_else(over)?;
        let slots = SlotMapping::in_blocks(hold.block_ids(), hold.block_size(), 0..hold.num_tokens());
        Ok(slots.map_err(CallError::from)?.to_vec())
    }

    /// The IDs of the piece's blocks, in token order.
    #[getter]
    fn block_ids(&self) -> PyResult<Vec<u32>> {
        Ok(numbers(self.0.lock().as_ref().ok_or_else(over)?.block_ids()))
    }

    /// The number of tokens.
    #[getter]
    fn num_tokens(&self) -> PyResult<usize> {
        Ok(self.0.lock().as_ref().ok_or_else(over)?.num_tokens())
    }

    /// The position that the piece's first key was rotated to when it was stored.
    #[getter]
    fn stored_start(&self) -> PyResult<i64> {
        Ok(self.0.lock().as_ref().ok_or_else(over)?.cached_position_start())
    }

    /// The hash by which the piece is found.
    #[getter]
    fn chunk_hash(&self) -> PyResult<PyChunkHash> {
        Ok(self.0.lock().as_ref().ok_or_else(over)?.chunk_hash().into())
    }

    /// Returns the segment through which a prompt attends to the piece. The piece's first token has the
    /// logical index `logical_start` and is used at `position`. Nothing is copied. Keep the hold until the
    /// attention is done.
    fn segment(&self, logical_start: usize, position: i64) -> PyResult<PySegment> {
        let own = self.0.lock();
        let hold = own.as_ref().ok_or_else(over)?;
        let stored = hold.cached_position_start();
        let ids = hold.block_ids().clone();
        let segment = kvcore::Segment::new(ids, hold.num_tokens(), logical_start, stored);
        let offset =
            position.checked_sub(stored).ok_or(kvcore::Error::Overflow { what: "offset of a chunk" });
        Ok(PySegment(segment.at_offset(offset.map_err(CallError::from)?)))
    }

    /// Returns another hold on the piece, for a second reader. Each of the holds is released by itself.
    fn share(&self) -> PyResult<Self> {
        let own = self.0.lock();
        Ok(Self(Mutex::new(Some(own.as_ref().ok_or_else(over)?.clone()))))
    }

    /// Releases the hold on the piece now.
    fn release(&self) {
        drop(self.0.lock().take());
    }
}

#[pymethods]
impl PyChunkReservation {
    /// The hash by which the piece will be found.
    #[getter]
    fn chunk_hash(&self) -> PyChunkHash {
        self.hash.into()
    }

    /// Returns the slots to write, with a permit to write to them.
    fn write_slots(&self) -> PyResult<PyWriteSlots> {
        let own = self.own.lock();
        Ok(PyWriteSlots(own.as_ref().ok_or_else(over)?.write_slots().map_err(CallError::from)?))
    }

    /// Stores the piece and returns a hold on it. The piece's slots must have been filled.
    fn store(&self) -> PyResult<PyPieceHold> {
        let own = self.own.lock().take().ok_or_else(over)?;
        Ok(PyPieceHold(Mutex::new(Some(own.store()))))
    }

    /// Gives up the reservation and frees its blocks. The next request that needs the piece must compute it.
    fn abandon(&self) {
        drop(self.own.lock().take());
    }
}

#[pymethods]
impl PyChunkWaiter {
    /// True once the other request has stored or abandoned the piece. The piece must then be acquired again.
    #[getter]
    fn is_over(&self) -> bool {
        self.own.is_over()
    }

    /// The hash by which the piece will be found.
    #[getter]
    fn chunk_hash(&self) -> PyChunkHash {
        self.hash.into()
    }
}

impl PyChunkCacheManager {
    fn build(config: kvchunk::ChunkCacheConfig, num_blocks: u32, block_size: usize) -> Result<Self> {
        let pool = ChunkBlockPool::new(0..num_blocks, block_size)?;
        Ok(Self(kvchunk::ChunkCacheManager::new(config, pool)?))
    }

    fn hasher(&self, root: [u8; 32], mode: &str, system: &[u32]) -> Result<ChunkHasher> {
        let mode: ComputeMode = mode.parse()?;
        let context = ChunkContext::new(BlockKey::from_bytes(root), mode, system);
        Ok(ChunkHasher::new(self.0.config().hash_algorithm, context, self.0.pool().block_size()))
    }
}

#[pymethods]
impl PyChunkCacheManager {
    /// Creates an empty cache over `num_blocks` blocks of `block_size` tokens each.
    #[new]
    fn new(config: &PyChunkCacheConfig, num_blocks: u32, block_size: usize) -> PyResult<Self> {
        Ok(Self::build(config.0.clone(), num_blocks, block_size)?)
    }

    /// Looks up every piece of a chunk under `root`, and reserves blocks for the missing ones. For each
    /// piece, in order, returns a `PieceHold`, a `ChunkReservation`, a `ChunkWaiter`, or `None` if there is
    /// no room. A long chunk has several pieces.
    ///
    /// `mode` (`"alone"`, `"with-system"`, `"sink:K"` or `"behind:N"`) selects the tokens of `system` that
    /// the chunk sees while it is computed. With `"behind:N"`, `system` must end with the decoys.
    /// `stored_start` is the position that the chunk's first key is rotated to when it is stored.
    fn acquire(
        &self,
        py: Python<'_>,
        root: [u8; 32],
        mode: &str,
        system: Vec<u32>,
        tokens: Vec<u32>,
        stored_start: i64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let mut parts = self.acquire_all(py, root, vec![(mode.to_owned(), system, tokens, stored_start)])?;
        Ok(parts.pop().unwrap_or_default())
    }

    /// Looks up the pieces of all parts of a prompt under `root`, and reserves blocks for the missing ones.
    /// Each part is a tuple of the other arguments of `acquire`. Returns the outcomes of `acquire` for each part.
    ///
    /// All stored pieces are held before a piece is reserved, so a prompt never evicts its own pieces. If there
    /// is no room for all missing pieces together, nothing is evicted, and the outcome of each of them is `None`.
    fn acquire_all(
        &self,
        py: Python<'_>,
        root: [u8; 32],
        parts: Vec<(String, Vec<u32>, Vec<u32>, i64)>,
    ) -> PyResult<Vec<Vec<Py<PyAny>>>> {
        if parts.iter().any(|(_, _, tokens, _)| tokens.is_empty()) {
            return Err(PyValueError::new_err("a chunk needs at least one token"));
        }
        let hashers: Vec<_> =
            parts.iter().map(|(mode, system, ..)| self.hasher(root, mode, system)).collect::<Result<_>>()?;
        let cache = self.0.clone();
        let acquire = || {
            let (mut pieces, mut counts) = (Vec::new(), Vec::new());
            for ((_, _, tokens, stored_start), hasher) in parts.iter().zip(&hashers) {
                let (before, mut start) = (pieces.len(), *stored_start);
                for piece in hasher.pieces(tokens, cache.config().max_chunk_tokens) {
                    let stored_start = start;
                    start += piece.tokens().len() as i64;
                    pieces.push((piece, stored_start));
                }
                counts.push(pieces.len() - before);
            }
            let hashes: Vec<_> = pieces.iter().map(|(piece, _)| piece.hash()).collect();
            (cache.acquire_all(TenantId::default(), &pieces).into_iter().zip(hashes), counts)
        };
        let (mut acquired, counts) = py.detach(acquire);
        let part = |count| acquired.by_ref().take(count).map(|(one, hash)| outcome(py, one, hash)).collect();
        counts.into_iter().map(part).collect()
    }

    /// Returns the hash of each piece of a chunk. The arguments are the same as for `acquire`.
    fn compute_chunk_hash(
        &self,
        root: [u8; 32],
        mode: &str,
        system: Vec<u32>,
        tokens: Vec<u32>,
    ) -> PyResult<Vec<PyChunkHash>> {
        let hasher = self.hasher(root, mode, &system)?;
        let pieces = hasher.pieces(&tokens, self.0.config().max_chunk_tokens);
        Ok(pieces.map(|piece| PyChunkHash::from(piece.hash())).collect())
    }

    /// Removes every chunk that is not held.
    fn clear_cache(&self) {
        self.0.clear();
    }

    /// Evicts one piece that is not held. `cache_policy` determines which piece; by default, it is the least
    /// recently used one. Returns false if nothing could be evicted.
    fn evict_lru(&self) -> bool {
        self.0.evict_lru()
    }

    /// Returns the counts since the cache was created, and the current gauges.
    fn get_metrics(&self) -> PyChunkCacheMetrics {
        PyChunkCacheMetrics::from(self.0.metrics())
    }

    /// Checks all internal counts by recounting. Raises an error that names the first count that is wrong.
    fn check_invariants(&self) -> PyResult<()> {
        self.0.check_invariants().map_err(KvCacheError::new_err)
    }

    /// Returns the names of the hash algorithms.
    #[staticmethod]
    fn hash_algorithms() -> Vec<String> {
        HashAlgorithm::ALL.iter().map(|algorithm| format!("{algorithm:?}")).collect()
    }
}

/// Converts the outcome of a lookup of the piece with this hash to a Python object.
fn outcome(py: Python<'_>, acquired: Acquired, hash: kvchunk::ChunkHash) -> PyResult<Py<PyAny>> {
    Ok(match acquired {
        Acquired::Hit(hold) => Py::new(py, PyPieceHold(Mutex::new(Some(hold))))?.into_any(),
        Acquired::Compute(reservation) => {
            let reserved = PyChunkReservation {
                block_ids: numbers(reservation.block_ids()),
                num_tokens: reservation.tokens().len(),
                stored_start: reservation.stored_start(),
                hash,
                own: Mutex::new(Some(reservation)),
            };
            Py::new(py, reserved)?.into_any()
        }
        Acquired::Busy(own) => Py::new(py, PyChunkWaiter { own, hash })?.into_any(),
        Acquired::NoRoom => py.None(),
    })
}
