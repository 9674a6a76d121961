//! Block tables of sequences, and the slots of their tokens.

use kvcore::{BlockId, SlotMapping, WritePairs};
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::CallError;
use crate::pool::{PyBlockPool, PySharedBlocks, keys_of};
use crate::segment::PySegment;
use crate::tensor::Integers;

/// A sequence's blocks in order: first shared blocks, then blocks that the sequence fills itself. All
/// blocks are released when the table is released or dropped.
#[pyclass(frozen, name = "BlockTable", module = "kvcache")]
pub(crate) struct PyBlockTable(Mutex<Option<kvcore::BlockTable>>);

/// Slots that may be written: a slot mapping with a permit from the owner of the blocks. Once a block is
/// shared or no longer belongs to this owner, writes to its slots are rejected.
#[pyclass(frozen, name = "WriteSlots", module = "kvcache")]
pub(crate) struct PyWriteSlots(pub(crate) kvcore::WriteSlots);

/// The copy that must be made before a sequence writes to a shared block. The shared block is held until this
/// object is dropped.
#[pyclass(frozen, name = "TailCopy", module = "kvcache")]
pub(crate) struct PyTailCopy(kvcore::TailCopy);

/// The slots of rows: either with a permit, or as plain numbers from an engine that manages blocks itself and
/// guarantees that nothing reads the slots during a write.
#[derive(FromPyObject)]
pub(crate) enum Slots<'py> {
    Permit(PyRef<'py, PyWriteSlots>),
    Numbers(Integers),
}

impl Slots<'_> {
    /// Returns the slots for writing.
    pub(crate) fn writable(self) -> kvcore::WriteSlots {
        match self {
            Self::Permit(slots) => slots.0.clone(),
            Self::Numbers(slots) => kvcore::WriteSlots::unchecked(slots.0),
        }
    }

    /// Returns the slots for reading.
    pub(crate) fn mapping(self) -> SlotMapping {
        match self {
            Self::Permit(slots) => slots.0.mapping().clone(),
            Self::Numbers(slots) => SlotMapping::from(slots.0),
        }
    }
}

/// Pairs of a block to read and a block to write: either from a `TailCopy`, or as plain IDs from an engine
/// that manages blocks itself.
#[derive(Debug)]
pub(crate) struct BlockPairs(pub(crate) WritePairs);

impl<'py> FromPyObject<'_, 'py> for BlockPairs {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(copy) = object.cast::<PyTailCopy>() {
            return Ok(Self(copy.get().0.pairs().clone()));
        }
        let pairs: Vec<(u32, u32)> = object.extract()?;
        let pairs: Vec<_> = pairs.into_iter().map(|(from, to)| (BlockId(from), BlockId(to))).collect();
        Ok(Self(WritePairs::unchecked(pairs)))
    }
}

fn over() -> PyErr {
    PyRuntimeError::new_err("the table was released")
}

impl PyBlockTable {
    fn with<T>(&self, work: impl FnOnce(&mut kvcore::BlockTable) -> kvcore::Result<T>) -> PyResult<T> {
        let mut own = self.0.lock();
        Ok(work(own.as_mut().ok_or_else(over)?).map_err(CallError::from)?)
    }
}

#[pymethods]
impl PyBlockTable {
    /// Creates an empty table, or one that starts with `prefix`: full blocks that were found by their keys.
    /// The table takes over these blocks.
    #[new]
    #[pyo3(signature = (pool, block_size, prefix = None))]
    fn new(pool: &PyBlockPool, block_size: usize, prefix: Option<&PySharedBlocks>) -> PyResult<Self> {
        let table = match prefix {
            Some(prefix) => kvcore::BlockTable::with_prefix(prefix.take()?, block_size),
            None => kvcore::BlockTable::new(&pool.pool, block_size),
        };
        Ok(Self(Mutex::new(Some(table.map_err(CallError::from)?))))
    }

    /// Reserves slots for `tokens` more tokens, and returns them.
    fn grow(&self, tokens: usize) -> PyResult<PyWriteSlots> {
        self.with(|table| table.grow(tokens)).map(PyWriteSlots)
    }

    /// Returns the slots of the tokens from `start` up to, but not including, `end`, with a permit to
    /// overwrite them.
    fn write_slots(&self, start: usize, end: usize) -> PyResult<PyWriteSlots> {
        self.with(|table| table.write_slots(start..end)).map(PyWriteSlots)
    }

    /// Returns the slots of the tokens from `start` up to, but not including, `end`, for reading.
    fn slots(&self, start: usize, end: usize) -> PyResult<Vec<i64>> {
        self.with(|table| (start..end).map(|token| table.slot(token)).collect())
    }

    /// The block IDs, in order.
    #[getter]
    fn block_ids(&self) -> PyResult<Vec<u32>> {
        self.with(|table| Ok(table.ids().iter().map(|id| id.0).collect()))
    }

    /// Returns the table's tokens as a segment. The first token has the logical index `logical_start`, and
    /// its key was rotated to position `stored_start`.
    #[pyo3(signature = (*, logical_start = 0, stored_start = 0))]
    fn segment(&self, logical_start: usize, stored_start: i64) -> PyResult<PySegment> {
        self.with(|table| {
            let ids = table.ids().clone();
            Ok(PySegment(kvcore::Segment::new(ids, table.len(), logical_start, stored_start)))
        })
    }

    /// Creates a second table over the same tokens. Both tables share all blocks. The first table that is
    /// written to must copy the last block.
    fn fork(&self) -> PyResult<Self> {
        self.with(kvcore::BlockTable::fork).map(|table| Self(Mutex::new(Some(table))))
    }

    /// If the last block is partially filled and shared, replaces it with a new block that belongs only to
    /// this table, and returns the copy to make with `Arena.copy` before the table grows. Returns `None` if
    /// no copy is needed.
    fn unshare_tail(&self) -> PyResult<Option<PyTailCopy>> {
        Ok(self.with(kvcore::BlockTable::unshare_tail)?.map(PyTailCopy))
    }

    /// Removes all tokens after the first `length` tokens.
    fn truncate(&self, length: usize) -> PyResult<()> {
        self.with(|table| table.truncate(length))
    }

    /// Shares the next full blocks under their keys, for lookups to find. The blocks' slots must have been
    /// filled. `parent` is the key that precedes the first key in the chain.
    #[pyo3(signature = (keys, parent = None))]
    fn share_full(&self, keys: Vec<[u8; 32]>, parent: Option<[u8; 32]>) -> PyResult<()> {
        let (parent, keys) = (parent.map(kvcore::BlockKey::from_bytes), keys_of(keys));
        self.with(|table| table.share_full(parent, &keys))
    }

    /// Releases all blocks now.
    fn release(&self) {
        drop(self.0.lock().take());
    }

    fn __len__(&self) -> PyResult<usize> {
        self.with(|table| Ok(table.len()))
    }
}

#[pymethods]
impl PyWriteSlots {
    /// Returns the slots, each `block * block_size + offset`.
    fn tolist(&self) -> Vec<i64> {
        self.0.to_vec()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

#[pymethods]
impl PyTailCopy {
    /// Pairs of the block to read and the block to write.
    #[getter]
    fn pairs(&self) -> Vec<(u32, u32)> {
        self.0.pairs().iter().map(|(from, to)| (from.0, to.0)).collect()
    }
}
