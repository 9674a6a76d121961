//! Blocks of arenas as records on a disk.
//!
//! A record contains whole blocks: a piece of a chunk, or a block of a prompt, with the rows of all arenas that have
//! the blocks. Nothing here waits for the disk except `SlabLoad.wait`, which waits for a limited time.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::{MissReason, ReplicaDevice};
use kvcore::{BlockId, KeyForm, WritePairs};
use kvtier::{Record, RecordId, RecordNote, Stored};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arena::Arena;
use crate::error::CallError;
use crate::slab::{PySlab, words_of};
use crate::slab_load::{SlabLoad, copy};

/// Records for the blocks of arenas of one shape, in which a block has the same ID.
///
/// A record is identified by its name, which covers everything that its bytes depend on. The tokens and the
/// position of the first one are compared when it is loaded.
#[pyclass(frozen, module = "kvcache._native")]
pub(crate) struct SlabBlocks {
    slab: Py<PySlab>,
    devices: Arc<[ReplicaDevice]>,
}

/// A record that is being loaded into blocks.
#[pyclass(frozen, extends = SlabLoad, module = "kvcache._native")]
pub(crate) struct BlockLoad {
    devices: Arc<[ReplicaDevice]>,
}

fn blocks_of(devices: &[ReplicaDevice], blocks: Vec<u32>) -> PyResult<Vec<BlockId>> {
    let count = devices.iter().map(|device| device.arena.layout().shape().num_blocks).min().unwrap_or(0);
    if let Some(block) = blocks.iter().find(|&&block| block as usize >= count) {
        return Err(PyValueError::new_err(format!("block {block} does not exist; there are {count}")));
    }
    Ok(blocks.into_iter().map(BlockId).collect())
}

impl SlabBlocks {
    fn id(&self, name: &[u8], tokens: &[u32], start: i64) -> RecordId {
        let own = self.slab.get();
        let words = words_of(name);
        let key = own.scope.child(&words);
        // The name is compared, too, although the key is its hash.
        let tokens = words.into_iter().chain(tokens.iter().copied()).collect();
        RecordId { key, tokens, stored_start: start, label: Arc::clone(&own.identity) }
    }
}

/// Returns the digest under which the same tokens are known in other contexts.
fn text_of(salt: Option<Vec<u8>>, tokens: &[u32]) -> Option<NonZeroU64> {
    let mut words = words_of(&salt?);
    words.extend_from_slice(tokens);
    RecordNote::text_of(&words)
}

#[pymethods]
impl SlabBlocks {
    #[new]
    fn new(slab: Py<PySlab>, arenas: Vec<PyRef<'_, Arena>>) -> PyResult<Self> {
        if arenas.is_empty() {
            return Err(PyValueError::new_err("records need at least one arena"));
        }
        let device_of = |arena: PyRef<'_, Arena>| {
            let (device, memory) = arena.parts();
            let (backend, stream) = (device.shared(), device.shared_stream());
            ReplicaDevice { backend, stream, arena: memory.clone(), keys: KeyForm::Rotated }
        };
        Ok(Self { slab, devices: arenas.into_iter().map(device_of).collect() })
    }

    /// Returns the number of bytes of the record with this name and the seconds that computing it took (0 if
    /// that is not known), or `None` if no record with this name is on the disk. Does not read the disk.
    fn peek(&self, name: &[u8]) -> PyResult<Option<(usize, f64)>> {
        let listing = self.slab.get().slab()?.peek(&self.id(name, &[], 0).key);
        Ok(listing.map(|listing| (listing.bytes, listing.note.cost.as_secs_f64())))
    }

    /// Copies blocks and queues them to be written, without waiting for the disk. Returns `queued`, `known`, or
    /// `dropped` if too much waits, the record is too large, or its parent is not there. Nothing else may write
    /// the blocks during the call.
    ///
    /// `parent` is the name of the record without which this one cannot be found. `seconds` is the time that
    /// computing the blocks took, or 0. The reason why another record with the same tokens is not found
    /// considers only records with the same `text`, and none if it is `None`.
    #[pyo3(signature = (name, tokens, start, blocks, *, parent = None, seconds = 0.0, text = None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn store(
        &self,
        py: Python<'_>,
        name: &[u8],
        tokens: Vec<u32>,
        start: i64,
        blocks: Vec<u32>,
        parent: Option<Vec<u8>>,
        seconds: f64,
        text: Option<Vec<u8>>,
    ) -> PyResult<&'static str> {
        let slab = self.slab.get().slab()?;
        let blocks = blocks_of(&self.devices, blocks)?;
        let id = self.id(name, &tokens, start);
        let parent = parent.map(|name| self.id(&name, &[], 0).key);
        let cost = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let note = RecordNote { parent, cost, text: text_of(text, &tokens), ..RecordNote::default() };
        let store = || {
            if slab.contains(&id.key) {
                return Ok(Stored::Known);
            }
            let memory = |lens: &[usize]| slab.buffers(lens);
            let mut buffers = Vec::new();
            for device in &*self.devices {
                buffers.extend(device.read_into(&blocks, &memory)?);
            }
            Ok(slab.store(Record { id, note, buffers }))
        };
        Ok(match py.detach(store).map_err(|error: kvchunk::Error| PyErr::from(CallError::from(error)))? {
            Stored::Queued => "queued",
            Stored::Known => "known",
            Stored::Dropped => "dropped",
        })
    }

    /// Makes records the last ones to leave, in this order. Does not read the disk.
    fn touch(&self, py: Python<'_>, names: Vec<Vec<u8>>) -> PyResult<usize> {
        let slab = self.slab.get().slab()?;
        let keys = || names.iter().map(|name| self.id(name, &[], 0).key).collect::<Vec<_>>();
        Ok(py.detach(|| slab.touch(&keys())))
    }

    /// Starts to load a record, without waiting for the disk.
    fn begin_load(
        &self,
        py: Python<'_>,
        name: &[u8],
        tokens: Vec<u32>,
        start: i64,
    ) -> PyResult<Py<BlockLoad>> {
        let slab = self.slab.get().slab()?;
        let id = self.id(name, &tokens, start);
        let loading = slab.begin_load(&id);
        Py::new(py, (BlockLoad { devices: Arc::clone(&self.devices) }, SlabLoad::new(loading, slab)))
    }

    /// Counts a miss, and returns why no record with this name is on the disk.
    #[pyo3(signature = (name, tokens, *, text = None))]
    fn why_absent(&self, name: &[u8], tokens: Vec<u32>, text: Option<Vec<u8>>) -> PyResult<&'static str> {
        let id = self.id(name, &tokens, 0);
        let missed = self.slab.get().slab()?.why_absent(&id, text_of(text, &tokens));
        Ok(MissReason::from(&missed).name())
    }
}

#[pymethods]
impl BlockLoad {
    /// Ends the load, and fills blocks of the arenas with the record. Returns `None`, or the reason why the blocks
    /// were not filled; a load that has not ended is late. Nothing else may use the blocks during the call.
    fn end(this: &Bound<'_, Self>, blocks: Vec<u32>) -> PyResult<Option<&'static str>> {
        let (devices, base) = (&*this.get().devices, this.as_super().get());
        let blocks = blocks_of(devices, blocks)?;
        let loading = base.take()?;
        Ok(copy(this.py(), loading.bytes(), || match loading.end() {
            Ok(buffers) => {
                let pairs: Vec<_> = (0..).map(BlockId).zip(blocks.iter().copied()).collect();
                // Arenas of one shape have as many buffers each.
                let own = buffers.len() / devices.len();
                let written = devices.iter().enumerate().try_for_each(|(i, device)| {
                    let pairs = WritePairs::unchecked(pairs.clone());
                    device.write(blocks.len(), pairs, &buffers[i * own..(i + 1) * own])
                });
                base.slab.recycle(buffers);
                written.err().map(|_| MissReason::Failed.name())
            }
            Err(missed) => Some(MissReason::from(&missed).name()),
        }))
    }
}
