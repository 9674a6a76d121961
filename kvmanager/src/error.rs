//! The error type of this crate.

use kvcore::BlockId;

pub(crate) use kvcore::Error as CoreError;

/// The errors of the managers, with the numbers needed to act on them.
///
/// A call that returns an error changes nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A block is not allocated: it was freed twice, given twice, or never allocated.
    #[error("block {block} is not allocated")]
    NotAllocated {
        /// The block.
        block: BlockId,
    },
    /// Another sequence already has this ID.
    #[error("sequence {0} exists already")]
    SequenceExists(u64),
    /// A sequence would exceed its maximum number of blocks.
    #[error("sequence {sequence} would have {blocks} blocks, the limit is {limit}")]
    SequenceTooLong {
        /// The sequence.
        sequence: u64,
        /// Number of blocks that the sequence would have.
        blocks: usize,
        /// Maximum number of blocks per sequence.
        limit: usize,
    },
    /// A request holds no blocks: it never reserved any, or was released.
    #[error("unknown request {0}")]
    UnknownRequest(u64),
    /// A piece of a merge has already arrived.
    #[error("stage {stage} of chunk {chunk} has arrived already")]
    DuplicatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// A piece belongs to a chunk that is already complete and may be in use.
    #[error("stage {stage} of chunk {chunk} is late: the chunk is already complete")]
    LatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// A fraction, threshold or heat is not between 0 and 1.
    #[error("{what} is {value}, not between 0 and 1")]
    NotAFraction {
        /// The quantity.
        what: &'static str,
        /// The value given.
        value: f64,
    },
    /// An error of `kvcore`.
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

/// Checks that two extents are equal.
pub(crate) fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Core(CoreError::mismatch(what, expected, got))) }
}
