//! A guard for the sleeping blocks of an arena.

use std::ops::Range;
use std::sync::Arc;

use super::arena::{PartGranules, ReservedMemory};
use crate::base::{BlockId, Result};
use crate::device::{KvArena, Stream};
use crate::paging::Rejected;

/// Sleeping blocks of a [`ReservedArena`](crate::ReservedArena), whose memory has been released.
///
/// # Drop behaviour
/// The saved contents are lost. The blocks get memory again and may be used. If the memory cannot be mapped,
/// the blocks stay marked as asleep forever.
#[derive(Debug)]
#[must_use = "dropping it loses what the blocks held"]
pub struct SleepingBlocks {
    memory: Arc<ReservedMemory>,
    tag: String,
    blocks: Range<u32>,
    keep: Vec<BlockId>,
    saved: Option<KvArena>,
    /// The released granules, if any.
    released: Vec<PartGranules>,
    /// Number of bytes of device memory that became free.
    released_bytes: usize,
}

impl SleepingBlocks {
    /// Saves the contents of `keep` and releases the blocks, which must already be marked as asleep.
    pub(super) fn fall(
        memory: Arc<ReservedMemory>,
        tag: &str,
        blocks: Range<u32>,
        keep: Vec<BlockId>,
        stream: &dyn Stream,
    ) -> Result<Self> {
        // Starting here, dropping `falling` removes the mark.
        let mut falling = Self {
            memory,
            tag: tag.to_owned(),
            blocks,
            keep,
            saved: None,
            released: Vec::new(),
            released_bytes: 0,
        };
        falling.saved = falling.memory.save(&falling.keep, stream)?;
        let granules = falling.memory.granules(&falling.blocks);
        match falling.memory.unmap(&granules) {
            Ok(bytes) => falling.released_bytes = bytes,
            Err(error) => {
                if let Some(saved) = &falling.saved {
                    falling.memory.restore(saved, &falling.keep, stream)?;
                }
                return Err(error);
            }
        }
        falling.released = granules;
        Ok(falling)
    }

    /// Maps memory for the blocks at their old addresses, and restores the saved contents. Waits for
    /// `stream`.
    ///
    /// # Errors
    /// Returns [`crate::Error::Allocation`] if there is not enough memory, and the stream's errors. In these
    /// cases the blocks stay asleep, and the error contains them.
    pub fn wake(mut self, stream: &dyn Stream) -> Result<(), Box<Rejected<Self>>> {
        if let Err(error) = self.rise(stream) {
            return Err(Box::new(Rejected { error, blocks: self }));
        }
        self.released.clear();
        Ok(())
    }

    fn rise(&self, stream: &dyn Stream) -> Result<()> {
        self.memory.map(&self.released)?;
        let Some(saved) = &self.saved else { return Ok(()) };
        self.memory.restore(saved, &self.keep, stream).inspect_err(|_| {
            // If the memory cannot be released again, it stays mapped, which is harmless.
            let _ = self.memory.unmap(&self.released);
        })
    }

    /// Returns the tag under which the blocks were put to sleep.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Returns the range of the blocks.
    pub fn blocks(&self) -> Range<u32> {
        self.blocks.clone()
    }

    /// Returns the number of bytes of device memory that became free. This is 0 on a device that keeps all
    /// memory of a storage while any part of it is mapped.
    pub fn released_bytes(&self) -> usize {
        self.released_bytes
    }

    /// Returns the size of the saved contents in host memory, in bytes.
    pub fn saved_bytes(&self) -> usize {
        self.saved.as_ref().map_or(0, |saved| self.keep.len() * saved.layout().block_bytes())
    }
}

impl Drop for SleepingBlocks {
    fn drop(&mut self) {
        if self.memory.map(&self.released).is_ok() {
            self.memory.unclaim(&self.blocks);
        }
    }
}
