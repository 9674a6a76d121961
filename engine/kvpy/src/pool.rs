//! Pools of blocks, the holders of blocks, and the keys that blocks are found by.

use std::sync::Arc;
use std::time::Duration;

use kvcore::{BlockId, BlockKey, EventQueue, KvEvent, PolicyKind, PoolConfig};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{CallError, KvCacheError};
use crate::names::named;
use crate::table::PyWriteSlots;
use crate::tensor::Integers;

/// The blocks of an arena, or of other memory. A block is free, being filled, shared, or cached. A cached
/// block can be found by its key until its memory is needed.
#[pyclass(frozen, name = "BlockPool", module = "kvcache")]
pub(crate) struct PyBlockPool {
    pub(crate) pool: kvcore::BlockPool,
    events: Option<Arc<EventQueue>>,
}

impl From<kvcore::BlockPool> for PyBlockPool {
    fn from(pool: kvcore::BlockPool) -> Self {
        Self { pool, events: None }
    }
}

/// Blocks that one owner fills. They become free when this object is released or dropped.
#[pyclass(frozen, name = "MutableBlocks", module = "kvcache")]
pub(crate) struct PyMutableBlocks(Mutex<Option<kvcore::MutableBlocks>>);

/// A hold on filled blocks, which any number of holders may read. After the last hold ends, a block with a
/// key stays cached, and a block without a key becomes free.
#[pyclass(frozen, name = "SharedBlocks", module = "kvcache")]
pub(crate) struct PySharedBlocks(Mutex<Option<kvcore::SharedBlocks>>);

fn over() -> PyErr {
    PyRuntimeError::new_err("the blocks were released, or passed to another object")
}

/// Converts bytes to keys.
pub(crate) fn keys_of(bytes: Vec<[u8; 32]>) -> Vec<BlockKey> {
    bytes.into_iter().map(BlockKey::from_bytes).collect()
}

/// Returns block IDs as integers.
pub(crate) fn numbers(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

#[pymethods]
impl PyBlockPool {
    /// Creates a pool of blocks `start` to `start + num_blocks - 1`. `policy` determines which cached blocks
    /// are evicted first: `"lru"`, `"s3-fifo"`, `"tiny-lfu"` or `"priority"`. A cached block expires after
    /// `ttl` seconds, or never if `ttl` is `None`. With `chains`, a block is evicted only after the cached blocks
    /// that were registered as following it. With `events`, the pool keeps up to this number of events for
    /// `take_events`.
    #[new]
    #[pyo3(signature = (num_blocks, *, start = 0, policy = "lru", ttl = None, chains = true, events = 0))]
    fn new(
        num_blocks: u32,
        start: u32,
        policy: &str,
        ttl: Option<f64>,
        chains: bool,
        events: usize,
    ) -> PyResult<Self> {
        let policy: PolicyKind = named("policy", policy)?;
        let events = (events > 0).then(|| Arc::new(EventQueue::new(events)));
        // Python holds one lock for all threads.
        let mut config = PoolConfig::default().policy(policy).chains(chains).shards(1);
        if let Some(events) = &events {
            config = config.events(events.clone());
        }
        if let Some(ttl) = ttl {
            let ttl = Duration::try_from_secs_f64(ttl);
            config = config.ttl(ttl.map_err(|error| PyValueError::new_err(format!("ttl: {error}")))?);
        }
        let end = start.checked_add(num_blocks).ok_or(kvcore::Error::Overflow { what: "the last block" });
        let pool = kvcore::BlockPool::with_config(start..end.map_err(CallError::from)?, config);
        Ok(Self { pool: pool.map_err(CallError::from)?, events })
    }

    /// Returns the events since the last call, oldest first: `("stored", key)`, `("removed", key)` or
    /// `("cleared", None)`. If the pool could not keep all events, the first one is `("lost", None)`.
    fn take_events(&self) -> Vec<(&'static str, Option<[u8; 32]>)> {
        let Some((events, lost)) = self.events.as_ref().map(|events| events.drain()) else {
            return Vec::new();
        };
        let mut told: Vec<_> = (lost > 0).then_some(("lost", None)).into_iter().collect();
        for event in events {
            match event {
                KvEvent::Stored { keys, .. } => {
                    told.extend(keys.iter().map(|key| ("stored", Some(*key.as_bytes()))));
                }
                KvEvent::Removed { key, .. } => told.push(("removed", Some(*key.as_bytes()))),
                KvEvent::Cleared => told.push(("cleared", None)),
            }
        }
        told
    }

    /// Allocates `n` blocks to fill, or none. Evicts cached blocks if necessary.
    fn allocate(&self, n: usize) -> PyResult<PyMutableBlocks> {
        let blocks = self.pool.allocate(n).map_err(CallError::from)?;
        Ok(PyMutableBlocks::new(blocks))
    }

    /// Acquires the blocks for the longest prefix of `keys` whose blocks are all in the pool.
    fn lookup(&self, keys: Vec<[u8; 32]>) -> PySharedBlocks {
        PySharedBlocks(Mutex::new(Some(self.pool.lookup_chain(&keys_of(keys)))))
    }

    /// Returns the number of blocks that `lookup` would currently find.
    fn cached_prefix(&self, keys: Vec<[u8; 32]>) -> usize {
        self.pool.cached_prefix(&keys_of(keys))
    }

    /// Returns the number of blocks in each state, and the number of evictions so far.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counts, dict) = (self.pool.counts(), PyDict::new(py));
        for (name, count) in [
            ("total", counts.total),
            ("free", counts.free),
            ("mutable", counts.mutable),
            ("shared", counts.shared),
            ("cached", counts.cached),
            ("evictable", counts.evictable),
        ] {
            dict.set_item(name, count)?;
        }
        dict.set_item("evictions", self.pool.evictions())?;
        Ok(dict)
    }

    /// Frees every cached block, and returns the number of freed blocks.
    fn clear_cached(&self) -> usize {
        self.pool.clear_cached()
    }

    /// Checks all internal counts by recounting. Raises an error that names the first count that is wrong.
    fn check_invariants(&self) -> PyResult<()> {
        self.pool.check_invariants().map_err(KvCacheError::new_err)
    }
}

impl PyMutableBlocks {
    pub(crate) fn new(blocks: kvcore::MutableBlocks) -> Self {
        Self(Mutex::new(Some(blocks)))
    }
}

#[pymethods]
impl PyMutableBlocks {
    /// The block IDs.
    #[getter]
    fn ids(&self) -> PyResult<Vec<u32>> {
        Ok(numbers(self.0.lock().as_ref().ok_or_else(over)?.ids()))
    }

    /// Returns a permit to write to `slots`, which must be in these blocks.
    fn write_slots(&self, block_size: usize, slots: Integers) -> PyResult<PyWriteSlots> {
        let own = self.0.lock();
        let slots = own.as_ref().ok_or_else(over)?.write_slots(block_size, slots.0);
        Ok(PyWriteSlots(slots.map_err(CallError::from)?))
    }

    /// Shares the filled blocks, each under a key. If another block already has the key, that block is used
    /// instead of the new one. `parent` is the key that precedes the first key in the chain.
    #[pyo3(signature = (keys, parent = None))]
    fn register(&self, keys: Vec<[u8; 32]>, parent: Option<[u8; 32]>) -> PyResult<PySharedBlocks> {
        let mut own = self.0.lock();
        let blocks = own.take().ok_or_else(over)?;
        let (parent, keys) = (parent.map(BlockKey::from_bytes), keys_of(keys));
        match blocks.register(parent, &keys) {
            Ok(shared) => Ok(PySharedBlocks(Mutex::new(Some(shared)))),
            Err(rejected) => {
                *own = Some(rejected.blocks);
                Err(CallError::from(rejected.error).into())
            }
        }
    }

    /// Shares the filled blocks without keys.
    fn share(&self) -> PyResult<PySharedBlocks> {
        let blocks = self.0.lock().take().ok_or_else(over)?;
        Ok(PySharedBlocks(Mutex::new(Some(blocks.share()))))
    }

    /// Frees the blocks now.
    fn release(&self) {
        drop(self.0.lock().take());
    }

    fn __len__(&self) -> usize {
        self.0.lock().as_ref().map_or(0, kvcore::MutableBlocks::len)
    }
}

impl PySharedBlocks {
    /// Transfers the blocks from this object to the caller.
    pub(crate) fn take(&self) -> PyResult<kvcore::SharedBlocks> {
        self.0.lock().take().ok_or_else(over)
    }
}

#[pymethods]
impl PySharedBlocks {
    /// The block IDs.
    #[getter]
    fn ids(&self) -> PyResult<Vec<u32>> {
        Ok(numbers(self.0.lock().as_ref().ok_or_else(over)?.ids()))
    }

    /// Releases the hold on the blocks now.
    fn release(&self) {
        drop(self.0.lock().take());
    }

    fn __len__(&self) -> usize {
        self.0.lock().as_ref().map_or(0, kvcore::SharedBlocks::len)
    }
}
