//! The one error type of this crate. Each variant carries the numbers needed to act on it.

use crate::base::{BlockId, DType, KvFormat};

/// What can go wrong in `kvcore` and in a backend that implements its contract.
///
/// A call that returns an error has changed nothing: no block is held, no metadata moved.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size does not fit into the address space.
    #[error("{what} overflows the address space")]
    Overflow {
        /// The quantity that overflowed.
        what: &'static str,
    },
    /// A count that must be at least one is zero.
    #[error("{what} must be at least 1")]
    Zero {
        /// The quantity that is zero.
        what: &'static str,
    },
    /// Two extents that must agree do not.
    #[error("{what}: expected {expected}, got {got}")]
    Mismatch {
        /// What was compared.
        what: &'static str,
        /// The extent required.
        expected: usize,
        /// The extent given.
        got: usize,
    },
    /// Two element types that must agree do not.
    #[error("{what}: expected {expected}, got {got}")]
    DTypeMismatch {
        /// What was compared.
        what: &'static str,
        /// The element type required.
        expected: DType,
        /// The element type given.
        got: DType,
    },
    /// Two KV formats that must agree do not.
    #[error("{what}: expected {expected}, got {got}")]
    FormatMismatch {
        /// What was compared.
        what: &'static str,
        /// The format required.
        expected: KvFormat,
        /// The format given.
        got: KvFormat,
    },
    /// A KV format that cannot be used in this way.
    #[error("KV format {format}: {reason}")]
    InvalidFormat {
        /// The format.
        format: KvFormat,
        /// Why it is refused.
        reason: String,
    },
    /// An index, length or id beyond its limit.
    #[error("{what} {value} is out of range: it must be below {limit}")]
    OutOfRange {
        /// The quantity that is out of range.
        what: &'static str,
        /// The value given.
        value: i128,
        /// The first value that is not allowed.
        limit: i128,
    },
    /// Strides under which two elements share an address, or which leave the storage.
    #[error("invalid strides for {what}: {reason}")]
    InvalidStrides {
        /// The plane or view.
        what: &'static str,
        /// Why they are refused.
        reason: String,
    },
    /// The pool cannot supply the blocks asked for, even after eviction.
    #[error(
        "out of blocks: {asked} asked, {free} free and {evictable} evictable of {total}; \
         free a sequence or give the pool more memory"
    )]
    OutOfBlocks {
        /// Blocks asked for.
        asked: usize,
        /// Blocks free when asked.
        free: usize,
        /// Cached blocks that eviction could have freed.
        evictable: usize,
        /// All blocks of the pool.
        total: usize,
    },
    /// A memory budget that does not hold a single block.
    #[error("not enough memory for a KV cache: the budget is {budget} bytes, one block takes {block_bytes}")]
    NotEnoughMemory {
        /// Bytes offered.
        budget: usize,
        /// Bytes of one block over all layers, K and V.
        block_bytes: usize,
    },
    /// A block that is free: freed twice, given twice, or never allocated.
    #[error("block {block} is not allocated")]
    NotAllocated {
        /// The block.
        block: BlockId,
    },
    /// A number that a sequence has already.
    #[error("sequence {0} exists already")]
    SequenceExists(u64),
    /// A sequence that would have more blocks than it may.
    #[error("sequence {sequence} would have {blocks} blocks, the limit is {limit}")]
    SequenceTooLong {
        /// The sequence.
        sequence: u64,
        /// Blocks it would have.
        blocks: usize,
        /// Most blocks of a sequence.
        limit: usize,
    },
    /// A sequence id that the cache does not hold (never created, or freed).
    #[error("unknown sequence {0}")]
    UnknownSequence(u64),
    /// Heads, layers or batch entries that do not divide among ranks.
    #[error("{count} {what} do not divide among {ranks} ranks")]
    Uneven {
        /// What is divided.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// Among how many.
        ranks: usize,
    },
    /// A piece of a merge that has arrived before.
    #[error("stage {stage} of chunk {chunk} has arrived already")]
    DuplicatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// A piece of a chunk that is complete, so that readers may use it.
    #[error("stage {stage} of chunk {chunk} is late: the chunk is complete and sealed")]
    LatePiece {
        /// The chunk of tokens.
        chunk: usize,
        /// The stage of the pipeline.
        stage: usize,
    },
    /// An operation of another kind of cache.
    #[error("a {cache} cache does not take {given}")]
    WrongCache {
        /// The cache that was asked.
        cache: &'static str,
        /// What it was given.
        given: &'static str,
    },
    /// A write into a block that others may read.
    #[error("block {block} is shared and must not be written (token {token}); copy it first")]
    SharedBlock {
        /// The block.
        block: BlockId,
        /// The token that would be written.
        token: usize,
    },
    /// A slot in a block that the writer does not fill itself: a shared block, a freed one, or another's.
    #[error("slot {slot} is not in a block that {} fills itself", Writer(*sequence))]
    NotOwned {
        /// The slot.
        slot: i64,
        /// The sequence that writes, or `None` for a write on behalf of any live sequence of the cache.
        sequence: Option<u64>,
    },
    /// Operands that must be apart share memory.
    #[error("{what}: operands share memory; copy one of them first")]
    Aliased {
        /// Which operands.
        what: &'static str,
    },
    /// A view in another kind of memory than an operation needs.
    #[error("{what}: expected {expected} memory, got {got} memory")]
    WrongMemory {
        /// Which operand.
        what: &'static str,
        /// The memory required: `"host"` or `"device"`.
        expected: &'static str,
        /// The memory it lies in.
        got: crate::base::MemoryKind,
    },
    /// A block that belongs to another pool.
    #[error("block {block} does not belong to this pool (blocks {start}..{end})")]
    ForeignBlock {
        /// The block given.
        block: BlockId,
        /// First block of the pool.
        start: u32,
        /// First block after the pool.
        end: u32,
    },
    /// Blocks that sleep: their memory is released.
    #[error("blocks {start}..{end} ({tag:?}) are asleep; wake them first")]
    Asleep {
        /// The name under which they were put to sleep.
        tag: String,
        /// First block of those that sleep.
        start: u32,
        /// First block after them.
        end: u32,
    },
    /// A backend was handed a storage, event or stream of another backend.
    #[error("{what} belongs to another backend than {backend}")]
    ForeignHandle {
        /// What was handed over.
        what: &'static str,
        /// The backend that refused it.
        backend: &'static str,
    },
    /// No device that the backend could run on, or not the one asked for.
    #[error("no device for the {backend} backend: {reason}")]
    NoDevice {
        /// The backend.
        backend: &'static str,
        /// What was found, and what to do.
        reason: String,
    },
    /// A device that is gone: unplugged, reset or destroyed. Its memory is gone with it; other devices are not
    /// affected.
    #[error("the device of the {backend} backend is lost: {reason}; open it again and compute anew")]
    DeviceLost {
        /// The backend.
        backend: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// Something that a device refused although it was asked correctly.
    #[error("the device of the {backend} backend refused: {reason}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// A combination that this backend lacks; listed by its `capabilities()`.
    #[error("{backend} does not support {what}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// The operation or combination.
        what: String,
    },
    /// An allocation that the device or the system refused.
    #[error("cannot allocate {bytes} bytes of {kind} memory: {reason}")]
    Allocation {
        /// Bytes asked for.
        bytes: usize,
        /// Which memory.
        kind: crate::base::MemoryKind,
        /// The system's reason.
        reason: String,
    },
    /// A pointer or view whose address does not fit its element type.
    #[error("{what} at {address:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// What was addressed.
        what: &'static str,
        /// Its address.
        address: u64,
        /// The alignment required.
        align: usize,
    },
    /// Offsets or indices of a sparse selection that are not in order.
    #[error("selection of row {row}: {reason}")]
    InvalidSelection {
        /// Row of the batch entry.
        row: usize,
        /// What is out of order.
        reason: String,
    },
    /// A request that holds no blocks (never reserved any, or was released).
    #[error("unknown request {0}")]
    UnknownRequest(u64),
    /// A share, threshold or heat that is not between 0 and 1.
    #[error("{what} is {value}, not between 0 and 1")]
    NotAFraction {
        /// Which quantity.
        what: &'static str,
        /// The value given.
        value: f64,
    },
    /// A RoPE specification that is contradictory or not supported.
    #[error("invalid RoPE configuration: {0}")]
    InvalidRope(String),
}

/// Who was to write, in words.
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

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// `expected == got`, or a [`Error::Mismatch`] that names `what`.
pub(crate) fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Mismatch { what, expected, got }) }
}

/// The product of `factors`, or [`Error::Overflow`].
pub(crate) fn product(what: &'static str, factors: &[usize]) -> Result<usize> {
    factors
        .iter()
        .try_fold(1usize, |a, &b| a.checked_mul(b))
        .filter(|&n| isize::try_from(n).is_ok())
        .ok_or(Error::Overflow { what })
}
