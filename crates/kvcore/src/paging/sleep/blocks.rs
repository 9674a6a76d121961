//! Blocks of an arena that sleep.

use std::ops::Range;
use std::sync::Arc;

use super::arena::{Granules, Memory};
use crate::base::{BlockId, Result};
use crate::device::{KvArena, Stream};
use crate::paging::Rejected;

/// Blocks of a [`ReservedArena`](crate::ReservedArena) whose memory is released.
///
/// # Drop behaviour
/// What was kept is lost; the blocks have memory again and may be used. If even that is refused, they
/// count as asleep for ever.
#[derive(Debug)]
#[must_use = "dropping it loses what the blocks held"]
pub struct SleepingBlocks {
    memory: Arc<Memory>,
    tag: String,
    blocks: Range<u32>,
    keep: Vec<BlockId>,
    saved: Option<KvArena>,
    /// What is released; empty while it is not.
    released: Vec<Granules>,
}

impl SleepingBlocks {
    /// Saves and releases blocks that are claimed.
    pub(super) fn fall(
        memory: Arc<Memory>,
        tag: &str,
        blocks: Range<u32>,
        keep: Vec<BlockId>,
        stream: &dyn Stream,
    ) -> Result<Self> {
        // From here on a drop gives the claim back.
        let mut falling =
            Self { memory, tag: tag.to_owned(), blocks, keep, saved: None, released: Vec::new() };
        falling.saved = falling.memory.save(&falling.keep, stream)?;
        let granules = falling.memory.granules(&falling.blocks);
        if let Err(error) = falling.memory.unmap(&granules) {
            if let Some(saved) = &falling.saved {
                falling.memory.restore(saved, &falling.keep, stream)?;
            }
            return Err(error);
        }
        falling.released = granules;
        Ok(falling)
    }

    /// Gives the blocks memory again, at the addresses that they had, and the kept ones their contents.
    /// Waits for `stream`.
    ///
    /// # Errors
    /// [`crate::Error::Allocation`] when memory is refused, what the stream refuses; the blocks sleep on and
    /// are given back.
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
            // What cannot be released again stays mapped, which harms nobody.
            let _ = self.memory.unmap(&self.released);
        })
    }

    /// The name under which they sleep.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The blocks.
    pub fn blocks(&self) -> Range<u32> {
        self.blocks.clone()
    }

    /// Bytes of device memory that were released.
    pub fn released_bytes(&self) -> usize {
        self.released.iter().map(|(_, range)| range.len()).sum()
    }

    /// Bytes of host memory that hold what was kept.
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
