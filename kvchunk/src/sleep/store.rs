//! The contract of a place where pieces sleep.

use std::fmt;

use kvcore::{BlockId, MutableBlocks};

use crate::error::Result;

/// A place where pieces sleep.
///
/// The cache calls a store without any lock of its own, and drops saved contents without one. A store that
/// uses its cache must hold a [`WeakChunkCache`](crate::WeakChunkCache); otherwise neither would ever be
/// freed.
///
/// A store may enqueue its copies instead of waiting for them, if the copies are ordered with everything that
/// reads or writes the blocks later. [`ArenaSleep`](crate::ArenaSleep) enqueues them on the stream that
/// computes.
pub trait SleepStore: Send + Sync + fmt::Debug {
    /// Saves the contents of blocks.
    ///
    /// # Errors
    /// Returns the error of the store. In that case nothing is kept, and the blocks are unchanged.
    fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>>;
}

/// The saved contents of a piece. Dropping them gives their memory back.
pub trait Sleeping: Send + Sync + fmt::Debug {
    /// Writes the contents into blocks, as many as the contents came from.
    ///
    /// # Errors
    /// Returns the error of the store if the contents cannot be read back. In that case the contents of the
    /// blocks do not matter.
    fn restore(&self, blocks: &MutableBlocks) -> Result<()>;

    /// Returns the number of bytes that the saved contents take.
    fn bytes(&self) -> usize;

    /// Returns true if the restored contents are bit for bit the saved ones.
    fn is_exact(&self) -> bool {
        true
    }
}

/// A piece's contents in a lower memory, with the properties that the store reported.
#[derive(Debug)]
pub(crate) struct SavedPiece {
    pub(crate) contents: Box<dyn Sleeping>,
    pub(crate) bytes: usize,
    pub(crate) exact: bool,
}
