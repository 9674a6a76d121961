//! The chunk cache: which chunks are in an arena, where, and who computes those that are missing.

use kvchunk::{Acquired, ChunkBlockPool, ChunkContext, ChunkHasher, ComputeMode, HashAlgorithm, TenantId};
use kvcore::{BlockKey, SlotMapping};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Failure, KvCacheError, Result};
use crate::metrics::ChunkCacheMetrics;
use crate::prompt::ChunkHash;
use crate::segment::Segment;
use crate::table::WriteSlots;

/// The settings of a chunk cache. Names that are left out keep their defaults.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct ChunkCacheConfig(pub(crate) kvchunk::ChunkCacheConfig);

#[pymethods]
impl ChunkCacheConfig {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(py: Python<'_>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let json = py.import("json")?;
        let text: String = match settings {
            Some(settings) => json.call_method1("dumps", (settings,))?.extract()?,
            None => "{}".to_owned(),
        };
        let config: kvchunk::ChunkCacheConfig = serde_json::from_str(&text)
            .map_err(|error| PyValueError::new_err(format!("settings of the chunk cache: {error}")))?;
        config.check().map_err(Failure::from)?;
        Ok(Self(config))
    }

    /// All settings, by their names.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text =
            serde_json::to_string(&self.0).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// The chunks in the blocks of an arena. The bytes themselves may lie elsewhere, such as in the arenas of several workers.
///
/// Chunks are found by all that their bytes depend on, and by their tokens. A chunk is computed by one request at a time; others wait.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct ChunkCacheManager(kvchunk::ChunkCacheManager);

/// A stored piece of a chunk that is held: it is neither written nor evicted until the hold is dropped or released.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct PieceHold(Mutex<Option<kvchunk::PieceHold>>);

/// Blocks for a missing piece of a chunk, which this request computes. Dropping it gives the blocks back.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct ChunkReservation {
    own: Mutex<Option<kvchunk::ChunkReservation>>,
    #[pyo3(get)]
    slots: Vec<i64>,
    #[pyo3(get)]
    stored_start: i64,
}

/// Work of another request on a piece of a chunk.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct ChunkWaiter(kvchunk::ChunkWaiter);

fn over() -> PyErr {
    PyRuntimeError::new_err("it was released or stored before")
}

#[pymethods]
impl PieceHold {
    /// The slots of the piece's tokens in the arena.
    #[getter]
    fn slots(&self) -> PyResult<Vec<i64>> {
        let own = self.0.lock();
        let hold = own.as_ref().ok_or_else(over)?;
        let slots = SlotMapping::in_blocks(hold.block_ids(), hold.block_size(), 0..hold.num_tokens());
        Ok(slots.map_err(Failure::from)?.to_vec())
    }

    /// The number of tokens.
    #[getter]
    fn num_tokens(&self) -> PyResult<usize> {
        Ok(self.0.lock().as_ref().ok_or_else(over)?.num_tokens())
    }

    /// The position that the first key was rotated to when the piece was stored.
    #[getter]
    fn stored_start(&self) -> PyResult<i64> {
        Ok(self.0.lock().as_ref().ok_or_else(over)?.cached_position_start())
    }

    /// The hash that the piece is found by.
    #[getter]
    fn chunk_hash(&self) -> PyResult<ChunkHash> {
        Ok(self.0.lock().as_ref().ok_or_else(over)?.chunk_hash().into())
    }

    /// The piece as attention reads it in a prompt: its first token has the logical index `logical_start`, and is used at `position`.
    /// Nothing is copied. The hold must outlast the attention.
    fn segment(&self, logical_start: usize, position: i64) -> PyResult<Segment> {
        let own = self.0.lock();
        let hold = own.as_ref().ok_or_else(over)?;
        let stored = hold.cached_position_start();
        let ids = hold.block_ids().clone();
        let segment = kvcore::Segment::new(ids, hold.num_tokens(), logical_start, stored);
        let offset =
            position.checked_sub(stored).ok_or(kvcore::Error::Overflow { what: "offset of a chunk" });
        Ok(Segment(segment.at_offset(offset.map_err(Failure::from)?)))
    }

    /// Ends the hold now.
    fn release(&self) {
        drop(self.0.lock().take());
    }
}

#[pymethods]
impl ChunkReservation {
    /// The slots to write, with the permit of this reservation.
    fn write_slots(&self) -> PyResult<WriteSlots> {
        let own = self.own.lock();
        Ok(WriteSlots(own.as_ref().ok_or_else(over)?.write_slots().map_err(Failure::from)?))
    }

    /// Stores the piece, whose slots have been filled, and returns a hold on it.
    fn store(&self) -> PyResult<PieceHold> {
        let own = self.own.lock().take().ok_or_else(over)?;
        Ok(PieceHold(Mutex::new(Some(own.store()))))
    }

    /// Gives the blocks back. The next request computes the piece.
    fn abandon(&self) {
        drop(self.own.lock().take());
    }
}

#[pymethods]
impl ChunkWaiter {
    /// True once the work is over: ask for the piece again.
    #[getter]
    fn is_over(&self) -> bool {
        self.0.is_over()
    }
}

impl ChunkCacheManager {
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
impl ChunkCacheManager {
    /// Creates an empty cache over `num_blocks` blocks of `block_size` tokens.
    #[new]
    fn new(config: &ChunkCacheConfig, num_blocks: u32, block_size: usize) -> PyResult<Self> {
        Ok(Self::build(config.0.clone(), num_blocks, block_size)?)
    }

    /// Looks up every piece of a chunk under the keys of `root`, and reserves blocks for those that are missing. Returns one of
    /// `PieceHold`, `ChunkReservation`, `ChunkWaiter` and `None` (no room) for each piece, in order. A long chunk has several pieces.
    ///
    /// `mode` is `"alone"`, `"with-system"` or `"sink:K"`: what a chunk sees of the tokens of `system` while it is computed.
    /// `stored_start` is the position that its first key is rotated to when it is stored.
    fn acquire(
        &self,
        py: Python<'_>,
        root: [u8; 32],
        mode: &str,
        system: Vec<u32>,
        tokens: Vec<u32>,
        stored_start: i64,
    ) -> PyResult<Vec<Py<PyAny>>> {
        if tokens.is_empty() {
            return Err(PyValueError::new_err("a chunk needs at least one token"));
        }
        let hasher = self.hasher(root, mode, &system)?;
        let cache = self.0.clone();
        let acquire = move || {
            let mut start = stored_start;
            let piece = |piece: kvchunk::ChunkPiece<'_>| {
                let acquired = cache.acquire(TenantId::default(), &piece, start);
                start += piece.tokens().len() as i64;
                acquired
            };
            hasher.pieces(&tokens, cache.config().max_chunk_tokens).map(piece).collect::<Vec<_>>()
        };
        py.detach(acquire).into_iter().map(|acquired| outcome(py, acquired)).collect()
    }

    /// The hash of each piece of a chunk, with everything that it is found by. Takes what `acquire` takes.
    fn compute_chunk_hash(
        &self,
        root: [u8; 32],
        mode: &str,
        system: Vec<u32>,
        tokens: Vec<u32>,
    ) -> PyResult<Vec<ChunkHash>> {
        let hasher = self.hasher(root, mode, &system)?;
        let pieces = hasher.pieces(&tokens, self.0.config().max_chunk_tokens);
        Ok(pieces.map(|piece| ChunkHash::from(piece.hash())).collect())
    }

    /// Forgets every chunk that nobody holds.
    fn clear_cache(&self) {
        self.0.clear();
    }

    /// Gives up the piece that was used longest ago, or that `cache_policy` puts first. Returns false if all are held.
    fn evict_lru(&self) -> bool {
        self.0.evict_lru()
    }

    /// The counts since the cache was made, and the gauges of this moment.
    fn get_metrics(&self) -> ChunkCacheMetrics {
        ChunkCacheMetrics::from(self.0.metrics())
    }

    /// Recounts everything, and raises an error that says which number is wrong.
    fn check_invariants(&self) -> PyResult<()> {
        self.0.check_invariants().map_err(KvCacheError::new_err)
    }

    /// The names of the hash algorithms.
    #[staticmethod]
    fn hash_algorithms() -> Vec<String> {
        HashAlgorithm::ALL.iter().map(|algorithm| format!("{algorithm:?}")).collect()
    }
}

/// Returns what became of a request for a piece, as an object of Python.
fn outcome(py: Python<'_>, acquired: Acquired) -> PyResult<Py<PyAny>> {
    Ok(match acquired {
        Acquired::Hit(hold) => Py::new(py, PieceHold(Mutex::new(Some(hold))))?.into_any(),
        Acquired::Compute(reservation) => {
            let slots = reservation.write_slots().map_err(Failure::from)?.to_vec();
            let stored_start = reservation.stored_start();
            Py::new(py, ChunkReservation { own: Mutex::new(Some(reservation)), slots, stored_start })?
                .into_any()
        }
        Acquired::Busy(waiter) => Py::new(py, ChunkWaiter(waiter))?.into_any(),
        Acquired::NoRoom => py.None(),
    })
}
