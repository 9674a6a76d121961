//! The contract between a cache and the store in which its pieces sleep.

use std::fmt;

use kvcore::{BlockId, MutableBlocks};

use crate::error::Result;

/// A store in which pieces sleep.
///
/// The cache holds none of its locks when it calls a store or drops saved contents. A store that uses its
/// cache must hold a [`WeakChunkCache`](crate::WeakChunkCache); otherwise neither would ever be freed.
///
/// A store may enqueue its copies instead of waiting for them, if everything that reads or writes the blocks
/// later is ordered after the copies. [`ArenaSleep`](crate::ArenaSleep) enqueues them on the compute stream.
pub trait SleepStore: Send + Sync + fmt::Debug {
    /// Saves the contents of `blocks`, without changing the blocks.
    ///
    /// # Errors
    /// Returns the store's error. In that case, nothing is kept.
    fn save(&self, blocks: &[BlockId]) -> Result<Box<dyn Sleeping>>;
}

/// The saved contents of a piece. Dropping them frees their memory.
pub trait Sleeping: Send + Sync + fmt::Debug {
    /// Writes the contents to `blocks`. There must be as many blocks as were saved.
    ///
    /// # Errors
    /// Returns the store's error if the contents cannot be read back. In that case, the contents of the
    /// blocks are undefined.
    fn restore(&self, blocks: &MutableBlocks) -> Result<()>;

    /// Returns the number of bytes that the saved contents use.
    fn bytes(&self) -> usize;

    /// Returns whether the restored contents are bit-identical to the saved contents.
    fn is_exact(&self) -> bool {
        true
    }
}

/// A piece's contents in a lower memory tier, with the properties that the store reported.
#[derive(Debug)]
pub(crate) struct SavedPiece {
    pub(crate) contents: Box<dyn Sleeping>,
    pub(crate) bytes: usize,
    pub(crate) exact: bool,
}
