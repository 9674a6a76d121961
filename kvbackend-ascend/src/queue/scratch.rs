//! Scratch memory for an operation's intermediate results.

use std::sync::{Arc, Weak};

use kvcore::{Error, MemoryKind, Result, Storage};

use crate::device::Npu;
use crate::memory::AscendStorage;

/// Alignment of each piece of scratch memory, in bytes.
const ALIGN: usize = 64;

/// Padding after each piece, in bytes, because operators may read past its end.
const PADDING: usize = 32;

/// Minimum size of a block of scratch memory, in bytes.
const LEAST: usize = 1 << 20;

/// Scratch memory that a stream's graphs share, because their replays run one after another. The memory lives
/// as long as one of the graphs holds it. Each block is listed with the address of the ACL stream whose work
/// uses it.
pub(super) type SharedScratch = Vec<(usize, Weak<dyn Storage>)>;

/// A memory block from which an operation takes pieces for its intermediate results.
///
/// The stream's next operation reuses the same pieces, because its operators run later.
#[derive(Debug, Default)]
pub(super) struct WorkScratch {
    memory: Option<Arc<dyn Storage>>,
    used: usize,
}

/// The amount of scratch memory in use at some point.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScratchMark {
    memory: Option<u64>,
    used: usize,
}

impl WorkScratch {
    /// Creates scratch memory that starts with a block from earlier work, if there is one.
    pub(super) fn over(memory: Option<Arc<dyn Storage>>) -> Self {
        Self { memory, used: 0 }
    }

    pub(super) fn memory(&self) -> Option<&Arc<dyn Storage>> {
        self.memory.as_ref()
    }

    /// Makes all of the memory available to the next operation.
    pub(super) fn restart(&mut self) {
        self.used = 0;
    }

    /// Returns the address of a piece of `bytes` bytes, and the memory block that contains it. The caller must
    /// keep the block alive until the work that uses the piece has finished.
    pub(super) fn piece(&mut self, npu: &Arc<Npu>, bytes: usize) -> Result<(u64, Arc<dyn Storage>)> {
        let wanted = bytes
            .checked_add(PADDING)
            .and_then(|bytes| bytes.checked_next_multiple_of(ALIGN))
            .ok_or(Error::Overflow { what: "bytes between operators" })?;
        let memory = match &self.memory {
            Some(memory) if memory.len() - self.used >= wanted => Arc::clone(memory),
            before => {
                // Enqueued work still holds the old block, if there is one.
                let len = before.as_ref().map_or(LEAST, |memory| memory.len().saturating_mul(2)).max(wanted);
                let allocate = |len| AscendStorage::uninitialised(npu, MemoryKind::Device, len);
                let made = match allocate(len) {
                    // The device may have room for this piece, but not for a block of twice the size.
                    Err(Error::Allocation { .. }) if len > wanted => allocate(wanted)?,
                    made => made?,
                };
                self.used = 0;
                let made: Arc<dyn Storage> = Arc::new(made);
                self.memory.insert(made).clone()
            }
        };
        let at = memory.address() + self.used as u64;
        self.used += wanted;
        Ok((at, memory))
    }

    pub(super) fn mark(&self) -> ScratchMark {
        ScratchMark { memory: self.memory.as_ref().map(|memory| memory.address()), used: self.used }
    }

    /// Frees the pieces taken since `mark` was created, so that later operators can use their memory. Does
    /// nothing if the block has been replaced since then.
    pub(super) fn free_since(&mut self, mark: ScratchMark) {
        if self.mark().memory == mark.memory {
            self.used = mark.used;
        }
    }
}
