//! The error type of this crate.

use kvcore::BlockId;

pub(crate) use kvcore::Error as CoreError;

/// The errors of the managers, with the values needed to handle them.
///
/// Unless a function's documentation says otherwise, a call that fails changes nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A block ID does not refer to a block that [`BlockManager::allocate`](crate::BlockManager::allocate)
    /// returned: the block is free, it belongs to a sequence, or it was passed twice to one call.
    #[error("block {block} is not allocated")]
    NotAllocated {
        /// The ID of the block.
        block: BlockId,
    },
    /// Another sequence already has this ID.
    #[error("sequence {0} already exists")]
    SequenceExists(u64),
    /// A sequence would exceed its maximum number of blocks.
    #[error("sequence {sequence} would have {blocks} blocks, but the limit is {limit}")]
    SequenceTooLong {
        /// The ID of the sequence.
        sequence: u64,
        /// The number of blocks that the sequence would have.
        blocks: usize,
        /// The maximum number of blocks per sequence.
        limit: usize,
    },
    /// A request holds no blocks, because it never reserved any or has been released.
    #[error("unknown request {0}")]
    UnknownRequest(u64),
    /// A piece of a merge has already arrived.
    #[error("stage {stage} of chunk {chunk} has already arrived")]
    DuplicatePiece {
        /// The index of the piece's chunk.
        chunk: usize,
        /// The index of the piece's stage.
        stage: usize,
    },
    /// A piece belongs to a chunk that is already complete and may be in use.
    #[error("stage {stage} of chunk {chunk} is late: the chunk is already complete")]
    LatePiece {
        /// The index of the piece's chunk.
        chunk: usize,
        /// The index of the piece's stage.
        stage: usize,
    },
    /// A fraction, threshold or heat is not between 0 and 1.
    #[error("{what} is {value}; it must be between 0 and 1")]
    NotAFraction {
        /// The name of the quantity.
        what: &'static str,
        /// The value that was given.
        value: f64,
    },
    /// An error of `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// A result with this crate's error type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Creates the error for a value that is not below `limit`.
pub(crate) fn range(what: &'static str, value: usize, limit: usize) -> Error {
    Error::Core(CoreError::OutOfRange { what, value: value as i128, limit: limit as i128 })
}

/// Creates the error for a value above `most`.
pub(crate) fn too_large(what: &'static str, value: usize, most: usize) -> Error {
    Error::Core(CoreError::TooLarge { what, value: value as i128, most: most as i128 })
}

/// Checks that two extents are equal.
pub(crate) fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Core(CoreError::mismatch(what, expected, got))) }
}
