//! The error type of this crate. Each variant carries the numbers that a caller needs to act on it.

use crate::base::{BlockId, DType, KvFormat};

/// An error of `kvcore`, or of a backend that implements its contract.
///
/// A call that returns an error leaves the state as it was: no block is held and no metadata has moved.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size does not fit into the address space.
    #[error("{what} overflows the address space")]
    Overflow {
        /// The quantity that overflowed.
        what: &'static str,
    },
    /// A count is zero that must be at least one.
    #[error("{what} must be at least 1")]
    Zero {
        /// The quantity that is zero.
        what: &'static str,
    },
    /// Two extents differ that must be equal.
    #[error("{what}: expected {expected}, got {got}")]
    Mismatch {
        /// The extents compared.
        what: &'static str,
        /// The required extent.
        expected: usize,
        /// The given extent.
        got: usize,
    },
    /// Two element types differ that must be equal.
    #[error("{what}: expected {expected}, got {got}")]
    DTypeMismatch {
        /// The element types compared.
        what: &'static str,
        /// The required element type.
        expected: DType,
        /// The given element type.
        got: DType,
    },
    /// Two KV formats differ that must be equal.
    #[error("{what}: expected {expected}, got {got}")]
    FormatMismatch {
        /// The formats compared.
        what: &'static str,
        /// The required format.
        expected: KvFormat,
        /// The given format.
        got: KvFormat,
    },
    /// A KV format cannot be used in this way.
    #[error("KV format {format}: {reason}")]
    InvalidFormat {
        /// The refused format.
        format: KvFormat,
        /// The reason for the refusal.
        reason: String,
    },
    /// An index, length or id is beyond its limit.
    #[error("{what} {value} is out of range: it must be below {limit}")]
    OutOfRange {
        /// The quantity that is out of range.
        what: &'static str,
        /// The given value.
        value: i128,
        /// The first value that is not allowed.
        limit: i128,
    },
    /// Strides let two elements share an address, or reach past the end of the storage.
    #[error("invalid strides for {what}: {reason}")]
    InvalidStrides {
        /// The plane or view.
        what: &'static str,
        /// The reason for the refusal.
        reason: String,
    },
    /// The pool cannot supply the requested blocks, even after eviction.
    #[error(
        "out of blocks: {asked} asked, {free} free and {evictable} evictable of {total}; \
         free a sequence or give the pool more memory"
    )]
    OutOfBlocks {
        /// Number of blocks requested.
        asked: usize,
        /// Number of free blocks at the time of the request.
        free: usize,
        /// Number of cached blocks that eviction could have freed.
        evictable: usize,
        /// Number of blocks in the pool.
        total: usize,
    },
    /// A memory budget does not hold a single block.
    #[error("not enough memory for a KV cache: the budget is {budget} bytes, one block takes {block_bytes}")]
    NotEnoughMemory {
        /// Size of the budget in bytes.
        budget: usize,
        /// Bytes of one block over all layers: K, V and the scales stored per block.
        block_bytes: usize,
    },
    /// A block is free: it was freed twice, given twice, or never allocated.
    #[error("block {block} is not allocated")]
    NotAllocated {
        /// The block.
        block: BlockId,
    },
    /// A sequence with this number exists already.
    #[error("sequence {0} exists already")]
    SequenceExists(u64),
    /// A sequence would exceed its limit of blocks.
    #[error("sequence {sequence} would have {blocks} blocks, the limit is {limit}")]
    SequenceTooLong {
        /// The sequence.
        sequence: u64,
        /// Number of blocks that the sequence would have.
        blocks: usize,
        /// Largest number of blocks of a sequence.
        limit: usize,
    },
    /// The cache does not hold this sequence: it was never created, or it was freed.
    #[error("unknown sequence {0}")]
    UnknownSequence(u64),
    /// Heads, layers or batch entries do not divide evenly among ranks.
    #[error("{count} {what} do not divide among {ranks} ranks")]
    Uneven {
        /// The things to divide.
        what: &'static str,
        /// Number of things to divide.
        count: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A piece of a merge has arrived before.
    #[error("stage {stage} of chunk {chunk} has arrived already")]
    DuplicatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// A piece arrived for a chunk that is complete and may already be in use by readers.
    #[error("stage {stage} of chunk {chunk} is late: the chunk is complete and sealed")]
    LatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// An operation does not apply to this kind of cache.
    #[error("a {cache} cache does not take {given}")]
    WrongCache {
        /// The kind of cache that was called.
        cache: &'static str,
        /// The argument that was given.
        given: &'static str,
    },
    /// A write would change a block that others may read.
    #[error("block {block} is shared and must not be written (token {token}); copy it first")]
    SharedBlock {
        /// The block.
        block: BlockId,
        /// The token that the write would change.
        token: usize,
    },
    /// A slot lies in a block that the writer does not fill itself: a shared block, a freed block, or a
    /// block of another sequence.
    #[error("slot {slot} is not in a block that {} fills itself", Writer(*sequence))]
    NotOwned {
        /// The slot.
        slot: i64,
        /// The sequence that writes, or `None` for a write on behalf of any live sequence of the cache.
        sequence: Option<u64>,
    },
    /// Operands share memory that must be separate.
    #[error("{what}: operands share memory; copy one of them first")]
    Aliased {
        /// The operands.
        what: &'static str,
    },
    /// A view lies in another kind of memory than the operation requires.
    #[error("{what}: expected {expected} memory, got {got} memory")]
    WrongMemory {
        /// The operand.
        what: &'static str,
        /// The required memory: `"host"` or `"device"`.
        expected: &'static str,
        /// The kind of memory that the operand lies in.
        got: crate::base::MemoryKind,
    },
    /// A block belongs to another pool.
    #[error("block {block} does not belong to this pool (blocks {start}..{end})")]
    ForeignBlock {
        /// The given block.
        block: BlockId,
        /// First block of the pool.
        start: u32,
        /// First block after the pool.
        end: u32,
    },
    /// Blocks are asleep: their memory is released.
    #[error("blocks {start}..{end} ({tag:?}) are asleep; wake them first")]
    Asleep {
        /// The tag under which the blocks were put to sleep.
        tag: String,
        /// First block of the sleeping range.
        start: u32,
        /// First block after the sleeping range.
        end: u32,
    },
    /// A backend was given a storage, event or stream of another backend.
    #[error("{what} belongs to another backend than {backend}")]
    ForeignHandle {
        /// The object that was given.
        what: &'static str,
        /// The backend that refused the object.
        backend: &'static str,
    },
    /// There is no device that the backend could run on, or the requested device is not available.
    #[error("no device for the {backend} backend: {reason}")]
    NoDevice {
        /// The backend.
        backend: &'static str,
        /// The devices found, and the suggested remedy.
        reason: String,
    },
    /// A device is gone: unplugged, reset or destroyed. The contents of its memory are lost; other devices
    /// are not affected.
    #[error("the device of the {backend} backend is lost: {reason}; open it again and compute anew")]
    DeviceLost {
        /// The backend.
        backend: &'static str,
        /// The driver's message.
        reason: String,
    },
    /// A device refused a valid request.
    #[error("the device of the {backend} backend refused: {reason}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// The driver's message.
        reason: String,
    },
    /// The backend does not support this operation or combination; its `capabilities()` list the supported
    /// ones.
    #[error("{backend} does not support {what}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// The operation or combination.
        what: String,
    },
    /// The device or the system refused an allocation.
    #[error("cannot allocate {bytes} bytes of {kind} memory: {reason}")]
    Allocation {
        /// Number of bytes requested.
        bytes: usize,
        /// The kind of memory requested.
        kind: crate::base::MemoryKind,
        /// The system's reason.
        reason: String,
    },
    /// The address of a pointer or view is not a multiple of the required alignment.
    #[error("{what} at {address:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// The pointer or view.
        what: &'static str,
        /// Its address.
        address: u64,
        /// The required alignment in bytes.
        align: usize,
    },
    /// Offsets or indices of a sparse selection are not in order.
    #[error("selection of row {row}: {reason}")]
    InvalidSelection {
        /// Row of the batch.
        row: usize,
        /// The offsets or indices that are out of order.
        reason: String,
    },
    /// A request holds no blocks: it never reserved any, or has released them.
    #[error("unknown request {0}")]
    UnknownRequest(u64),
    /// A share, threshold or heat is not between 0 and 1.
    #[error("{what} is {value}, not between 0 and 1")]
    NotAFraction {
        /// The quantity.
        what: &'static str,
        /// The given value.
        value: f64,
    },
    /// A RoPE specification is contradictory or not supported.
    #[error("invalid RoPE configuration: {0}")]
    InvalidRope(String),
}

/// The writer of a refused slot, for the error message.
struct Writer(Option<u64>);

impl std::fmt::Display for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(sequence) => write!(f, "sequence {sequence}"),
            None => f.write_str("a live sequence of this cache"),
        }
    }
}

impl Error {
    pub(crate) fn range(what: &'static str, value: impl TryInto<i128>, limit: impl TryInto<i128>) -> Self {
        Self::OutOfRange {
            what,
            value: value.try_into().unwrap_or(i128::MAX),
            limit: limit.try_into().unwrap_or(i128::MAX),
        }
    }
}

/// A result whose error type defaults to [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Checks that `expected == got`. Otherwise returns an [`Error::Mismatch`] that names `what`.
pub(crate) fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Mismatch { what, expected, got }) }
}

/// Returns the product of `factors`, or [`Error::Overflow`].
pub(crate) fn product(what: &'static str, factors: &[usize]) -> Result<usize> {
    factors
        .iter()
        .try_fold(1usize, |a, &b| a.checked_mul(b))
        .filter(|&n| isize::try_from(n).is_ok())
        .ok_or(Error::Overflow { what })
}
