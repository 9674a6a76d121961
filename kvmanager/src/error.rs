//! The error type of this crate.

use kvcore::BlockId;

pub(crate) use kvcore::Error as CoreError;

/// Everything that a manager can refuse, with the numbers needed to act on it.
///
/// A call that returns an error has changed nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A block that is free: freed twice, given twice, or never allocated.
    #[error("block {block} is not allocated")]
    NotAllocated {
        /// The block.
        block: BlockId,
    },
    /// A number that another sequence has.
    #[error("sequence {0} exists already")]
    SequenceExists(u64),
    /// A sequence that would have more blocks than it may.
    #[error("sequence {sequence} would have {blocks} blocks, the limit is {limit}")]
    SequenceTooLong {
        /// The sequence.
        sequence: u64,
        /// Blocks that the sequence would have.
        blocks: usize,
        /// The most blocks of a sequence.
        limit: usize,
    },
    /// A request that holds no blocks: one that never reserved any, or was released.
    #[error("unknown request {0}")]
    UnknownRequest(u64),
    /// A piece of a merge that arrived before.
    #[error("stage {stage} of chunk {chunk} has arrived already")]
    DuplicatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// A piece of a chunk that is already complete, and may be in use.
    #[error("stage {stage} of chunk {chunk} is late: the chunk is already complete")]
    LatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// A share, threshold or heat outside 0 to 1.
    #[error("{what} is {value}, not between 0 and 1")]
    NotAFraction {
        /// The quantity.
        what: &'static str,
        /// The value given.
        value: f64,
    },
    /// From the caches below.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns the error for a value that is not below `limit`.
pub(crate) fn range(what: &'static str, value: usize, limit: usize) -> Error {
    Error::Core(CoreError::OutOfRange { what, value: value as i128, limit: limit as i128 })
}

/// Returns the error for a value above `most`.
pub(crate) fn too_large(what: &'static str, value: usize, most: usize) -> Error {
    Error::Core(CoreError::TooLarge { what, value: value as i128, most: most as i128 })
}

/// Checks that two extents agree.
pub(crate) fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Core(CoreError::mismatch(what, expected, got))) }
}
