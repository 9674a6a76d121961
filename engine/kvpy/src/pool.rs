//! Blocks by number: who holds them, who fills them, and who finds them by a key.

use std::time::Duration;

use kvcore::{BlockId, BlockKey, PolicyKind, PoolConfig};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Failure, KvCacheError};
use crate::names::named;
use crate::table::WriteSlots;
use crate::tensor::Integers;

/// The blocks of an arena, or of any other memory: free, being filled, shared, or kept under a key until room is needed.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct BlockPool(pub(crate) kvcore::BlockPool);

/// Blocks that one owner fills. They become free when they are released or dropped.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct MutableBlocks(Mutex<Option<kvcore::MutableBlocks>>);

/// Filled blocks that any number of holders read. A block whose last holder goes is kept if it has a key.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct SharedBlocks(Mutex<Option<kvcore::SharedBlocks>>);

fn over() -> PyErr {
    PyRuntimeError::new_err("the blocks were released, or given to somebody else")
}

/// Returns keys from their bytes.
pub(crate) fn keys_of(bytes: Vec<[u8; 32]>) -> Vec<BlockKey> {
    bytes.into_iter().map(BlockKey::from_bytes).collect()
}

fn numbers(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

#[pymethods]
impl BlockPool {
    /// Creates a pool of the blocks `start` to `start + num_blocks`. `policy` is the order in which kept blocks are given up: `"lru"`,
    /// `"s3-fifo"`, `"tiny-lfu"` or `"priority"`. After `ttl` seconds a kept block is no longer found.
    #[new]
    #[pyo3(signature = (num_blocks, *, start = 0, policy = "lru", ttl = None))]
    fn new(num_blocks: u32, start: u32, policy: &str, ttl: Option<f64>) -> PyResult<Self> {
        let policy: PolicyKind = named("policy", policy)?;
        let mut config = PoolConfig::default().policy(policy);
        if let Some(ttl) = ttl {
            let ttl = Duration::try_from_secs_f64(ttl);
            config = config.ttl(ttl.map_err(|error| PyValueError::new_err(format!("ttl: {error}")))?);
        }
        let end = start.checked_add(num_blocks).ok_or(kvcore::Error::Overflow { what: "the last block" });
        let pool = kvcore::BlockPool::with_config(start..end.map_err(Failure::from)?, config);
        Ok(Self(pool.map_err(Failure::from)?))
    }

    /// Takes `n` blocks to fill, or none. Kept blocks are given up if they are needed.
    fn allocate(&self, n: usize) -> PyResult<MutableBlocks> {
        Ok(MutableBlocks(Mutex::new(Some(self.0.allocate(n).map_err(Failure::from)?))))
    }

    /// Holds the blocks of the longest known beginning of a chain of keys.
    fn lookup(&self, keys: Vec<[u8; 32]>) -> SharedBlocks {
        SharedBlocks(Mutex::new(Some(self.0.lookup_chain(&keys_of(keys)))))
    }

    /// The number of blocks that a lookup would find now.
    fn cached_prefix(&self, keys: Vec<[u8; 32]>) -> usize {
        self.0.cached_prefix(&keys_of(keys))
    }

    /// The blocks in each state, by its name, and the number of blocks given up so far.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counts, dict) = (self.0.counts(), PyDict::new(py));
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
        dict.set_item("evictions", self.0.evictions())?;
        Ok(dict)
    }

    /// Forgets every kept block that nobody holds, and returns their number.
    fn clear_cached(&self) -> usize {
        self.0.clear_cached()
    }

    /// Recounts everything, and raises an error that says which number is wrong.
    fn check_invariants(&self) -> PyResult<()> {
        self.0.check_invariants().map_err(KvCacheError::new_err)
    }
}

#[pymethods]
impl MutableBlocks {
    /// The numbers of the blocks.
    #[getter]
    fn ids(&self) -> PyResult<Vec<u32>> {
        Ok(numbers(self.0.lock().as_ref().ok_or_else(over)?.ids()))
    }

    /// A permit to write these slots, which must lie in these blocks.
    fn write_slots(&self, block_size: usize, slots: Integers) -> PyResult<WriteSlots> {
        let own = self.0.lock();
        let slots = own.as_ref().ok_or_else(over)?.write_slots(block_size, slots.0);
        Ok(WriteSlots(slots.map_err(Failure::from)?))
    }

    /// Shares the blocks, which have been filled, under a key for each. A block whose key is known already is replaced by the known
    /// one. `parent` is the key before the first.
    #[pyo3(signature = (keys, parent = None))]
    fn register(&self, keys: Vec<[u8; 32]>, parent: Option<[u8; 32]>) -> PyResult<SharedBlocks> {
        let mut own = self.0.lock();
        let blocks = own.take().ok_or_else(over)?;
        match blocks.register(parent.map(BlockKey::from_bytes), &keys_of(keys)) {
            Ok(shared) => Ok(SharedBlocks(Mutex::new(Some(shared)))),
            Err(rejected) => {
                *own = Some(rejected.blocks);
                Err(Failure::from(rejected.error).into())
            }
        }
    }

    /// Shares the blocks, which have been filled, without keys.
    fn share(&self) -> PyResult<SharedBlocks> {
        let blocks = self.0.lock().take().ok_or_else(over)?;
        Ok(SharedBlocks(Mutex::new(Some(blocks.share()))))
    }

    /// Gives the blocks back now.
    fn release(&self) {
        drop(self.0.lock().take());
    }

    fn __len__(&self) -> usize {
        self.0.lock().as_ref().map_or(0, kvcore::MutableBlocks::len)
    }
}

impl SharedBlocks {
    /// Takes the blocks out of the object, for a new holder.
    pub(crate) fn take(&self) -> PyResult<kvcore::SharedBlocks> {
        self.0.lock().take().ok_or_else(over)
    }
}

#[pymethods]
impl SharedBlocks {
    /// The numbers of the blocks.
    #[getter]
    fn ids(&self) -> PyResult<Vec<u32>> {
        Ok(numbers(self.0.lock().as_ref().ok_or_else(over)?.ids()))
    }

    /// Ends the hold now.
    fn release(&self) {
        drop(self.0.lock().take());
    }

    fn __len__(&self) -> usize {
        self.0.lock().as_ref().map_or(0, kvcore::SharedBlocks::len)
    }
}
