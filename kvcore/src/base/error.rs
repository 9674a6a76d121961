//! The error type of this crate. Each variant carries the values that a caller needs to handle it.

use std::fmt;

use crate::base::{BlockId, DType, KvFormat};

/// An error of `kvcore`, or of a backend that implements its contract.
///
/// Unless a function's documentation says otherwise, a call that fails changes nothing: it keeps no blocks
/// and leaves all metadata unchanged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size does not fit in the address space.
    #[error("{what} overflows the address space")]
    Overflow {
        /// The quantity that overflowed.
        what: &'static str,
    },
    /// A count or size that must be at least 1 is 0.
    #[error("{what} must be at least 1")]
    Zero {
        /// The quantity that is zero.
        what: &'static str,
    },
    /// A factor that must be positive is 0 or less.
    #[error("{what} must be larger than 0, not {value}")]
    NotPositive {
        /// The factor that is not positive.
        what: &'static str,
        /// The given value.
        value: f64,
    },
    /// A token's block was freed because the token left the sliding window.
    #[error("the block of token {token} was freed; the sequence keeps only tokens {first} and later")]
    TokenFreed {
        /// The index of the token.
        token: usize,
        /// The index of the first token that still has a slot.
        first: usize,
    },
    /// The same item (a row, block, slot or sequence) was given twice in one call.
    #[error("one call contains {what} {number} twice; pass it only once")]
    Twice {
        /// The kind of item, such as `"slot"` or `"destination block"`.
        what: &'static str,
        /// The item's index or ID.
        number: u64,
    },
    /// Two sizes, element types or formats that must be equal differ.
    #[error("{what}: expected {expected}, got {got}")]
    Mismatch {
        /// The values that were compared.
        what: &'static str,
        /// The required value.
        expected: Compared,
        /// The given value.
        got: Compared,
    },
    /// Kernels cannot compute with this element type; see [`DType::COMPUTE`].
    #[error("{what}: kernels cannot compute with {got}; use f32, f16 or bf16")]
    NotComputed {
        /// The rows that have this element type.
        what: &'static str,
        /// The element type of the rows.
        got: DType,
    },
    /// A KV format cannot be used this way.
    #[error("KV format {format}: {reason}")]
    InvalidFormat {
        /// The rejected format.
        format: KvFormat,
        /// The reason for the rejection.
        reason: String,
    },
    /// An index, position or ID is not below its limit.
    #[error("{what} {value} is out of range: it must be below {limit}")]
    OutOfRange {
        /// The quantity that is out of range.
        what: &'static str,
        /// The given value.
        value: i128,
        /// The first value that is not allowed.
        limit: i128,
    },
    /// A length, count or end is larger than allowed.
    #[error("{what} {value} is too large; the maximum is {most}")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// The given value.
        value: i128,
        /// The largest allowed value.
        most: i128,
    },
    /// An extent is not a multiple of its required divisor.
    #[error("{what} {value} is not a multiple of {of}")]
    NotMultiple {
        /// The extent whose value is given, such as `"k_dim"`.
        what: &'static str,
        /// The given extent.
        value: usize,
        /// The required divisor of the extent.
        of: usize,
    },
    /// The strides are not allowed: two elements would share an address, a row would begin inside a byte, or
    /// the elements are not contiguous where they must be.
    #[error("invalid strides for {what}: {reason}")]
    InvalidStrides {
        /// The plane or view with the invalid strides.
        what: &'static str,
        /// The reason for the rejection.
        reason: String,
    },
    /// The pool cannot supply the requested blocks, even after eviction.
    #[error(
        "out of blocks: {asked} needed, {free} free and {evictable} evictable of {total}; {}",
        if asked > total { "give the pool more memory" } else { "free a sequence or give the pool more memory" }
    )]
    OutOfBlocks {
        /// Number of blocks requested, plus the watermark if this request must leave that many blocks free.
        asked: usize,
        /// Number of free blocks at the time of the request.
        free: usize,
        /// Number of cached blocks that eviction could have freed.
        evictable: usize,
        /// Number of blocks in the pool.
        total: usize,
    },
    /// A memory budget is too small for a single block.
    #[error(
        "not enough memory for a KV cache: the budget is {budget} bytes, but one block takes {block_bytes} bytes"
    )]
    NotEnoughMemory {
        /// Size of the budget in bytes.
        budget: usize,
        /// Size of one block in all layers, in bytes: K, V and the scales stored per block.
        block_bytes: usize,
    },
    /// The cache does not hold this sequence: it was never created, or it was freed.
    #[error("unknown sequence {0}")]
    UnknownSequence(u64),
    /// Heads, layers or batch entries cannot be divided among the ranks: heads must divide evenly, unless
    /// ranks hold replicas of them, and every rank must get at least one layer and batch entry.
    #[error("{count} {what} cannot be divided evenly among {ranks} ranks")]
    Uneven {
        /// The items to divide, such as `"layers"`.
        what: &'static str,
        /// Number of items to divide.
        count: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// The ranks of a group called different collectives. The group has failed on all ranks.
    #[error(
        "ranks call different collectives: {call} on rank {rank}, but {other} on another rank; stop the work on all ranks"
    )]
    RanksDiffer {
        /// The rank that noticed the difference.
        rank: usize,
        /// The collective that this rank called.
        call: String,
        /// The collective that another rank called.
        other: String,
    },
    /// A collective did not finish in time, usually because a rank did not call it. The group has failed on
    /// all ranks.
    #[error("{call} on rank {rank} waited {limit:?} for other ranks; stop the work on all ranks")]
    RanksTimedOut {
        /// The rank whose wait timed out.
        rank: usize,
        /// The collective that this rank called.
        call: String,
        /// The maximum time that a rank waits.
        limit: std::time::Duration,
    },
    /// A rank has left its group, so no further collective is possible.
    #[error("rank {0} has left the group; stop the work on all ranks")]
    RankLeft(usize),
    /// A rank has aborted its group, either explicitly or because it failed. The error on that rank explains
    /// why.
    #[error("rank {0} has stopped the group's work; stop it on all ranks")]
    RankAborted(usize),
    /// A write would change a block that others may read.
    #[error("block {block} is shared and must not be written (token {token}); copy it first")]
    SharedBlock {
        /// The block.
        block: BlockId,
        /// The token that the write would change.
        token: usize,
    },
    /// A write permit was requested for a block that the requester is not filling: a shared block, a freed
    /// block, or a block that another guard owns.
    #[error(
        "this owner does not fill block {block} and must not write to it; get the slots from the table or the guard that \
         fills the block"
    )]
    NotOwned {
        /// The block to be written.
        block: BlockId,
    },
    /// A write permit is void: since the permit was issued, one of its blocks was shared or freed, or the
    /// owner of the blocks was truncated, split or dropped.
    #[error(
        "the permit to write these {what} is no longer valid, because a block was shared, truncated or freed; get new \
         {what} from the table or the guard that fills the blocks"
    )]
    PermitVoid {
        /// The kind of permit: `"slots"` or `"blocks"`.
        what: &'static str,
    },
    /// Two operands share memory, although their memory must be separate.
    #[error("{what}: operands share memory; copy one of them first")]
    Aliased {
        /// The operands that share memory.
        what: &'static str,
    },
    /// A view is in the wrong kind of memory for the operation.
    #[error("{what}: expected {expected} memory, got {got} memory")]
    WrongMemory {
        /// The operand that is in the wrong memory.
        what: &'static str,
        /// The required memory: `"host"` or `"device"`.
        expected: &'static str,
        /// The kind of memory that the operand is in.
        got: crate::base::MemoryKind,
    },
    /// A block belongs to another pool.
    #[error("block {block} does not belong to this pool (blocks {start}..{end})")]
    ForeignBlock {
        /// The given block.
        block: BlockId,
        /// ID of the first block in the pool.
        start: u32,
        /// ID of the first block after the pool.
        end: u32,
    },
    /// The blocks are asleep: their memory has been released.
    #[error("blocks {start}..{end} ({tag:?}) are asleep; wake them first")]
    Asleep {
        /// The tag under which the blocks were put to sleep.
        tag: String,
        /// ID of the first block in the sleeping range.
        start: u32,
        /// ID of the first block after the sleeping range.
        end: u32,
    },
    /// A backend was given another backend's storage, event or stream.
    #[error("{what} does not belong to the {backend} backend")]
    ForeignHandle {
        /// The object that was given.
        what: &'static str,
        /// The backend that rejected the object.
        backend: &'static str,
    },
    /// The backend has no device to run on, or the requested device is not available.
    #[error("no device for the {backend} backend: {reason}")]
    NoDevice {
        /// The name of the backend.
        backend: &'static str,
        /// The devices that were found, and a suggested fix.
        reason: String,
    },
    /// The device is gone: unplugged, reset or destroyed. The contents of its memory are lost; other devices
    /// are not affected.
    #[error("the {backend} backend lost its device: {reason}; open the device again and recompute")]
    DeviceLost {
        /// The name of the backend.
        backend: &'static str,
        /// The driver's message.
        reason: String,
    },
    /// The device rejected a valid request.
    #[error("the {backend} backend's device rejected a call: {reason}")]
    Device {
        /// The name of the backend.
        backend: &'static str,
        /// The driver's message.
        reason: String,
    },
    /// The backend does not support this operation or combination. Its `capabilities()` list the supported
    /// types and formats, and the missing features.
    #[error("{backend} does not support {what}")]
    Unsupported {
        /// The name of the backend.
        backend: &'static str,
        /// The operation or combination that is not supported.
        what: String,
    },
    /// A captured graph has too little room, for example because a sequence has grown since the capture. The
    /// step must be captured again.
    #[error("the captured graph has no room for these {what}; capture it again")]
    GraphOutgrown {
        /// The replay inputs that do not fit.
        what: &'static str,
    },
    /// The device or the system failed to allocate memory.
    #[error("cannot allocate {bytes} bytes of {kind} memory: {reason}")]
    Allocation {
        /// Number of bytes requested.
        bytes: usize,
        /// The kind of memory requested.
        kind: crate::base::MemoryKind,
        /// The reason that the device or the system gave.
        reason: String,
    },
    /// A view of 4-bit elements, or one of its elements, begins in the middle of a byte.
    #[error("{what} starts in the middle of the byte at {address:#x}; it must start at a whole byte")]
    InsideByte {
        /// The view or element that starts inside a byte.
        what: &'static str,
        /// The address of the byte.
        address: u64,
    },
    /// An address or an offset is not a multiple of the required alignment.
    #[error("{what} at {address:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// The pointer, view or range that is not aligned.
        what: &'static str,
        /// The misaligned address or offset.
        address: u64,
        /// The required alignment in bytes.
        align: usize,
    },
    /// The offsets or indices of a sparse selection are not in order, or the operation does not support
    /// selections.
    #[error("selection of row {row}: {reason}")]
    InvalidSelection {
        /// Index of the row in its entry.
        row: usize,
        /// The reason for the rejection.
        reason: String,
    },
    /// The RoPE specification is contradictory or not supported.
    #[error("invalid RoPE configuration: {0}")]
    InvalidRope(String),
}

/// One side of an [`Error::Mismatch`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Compared {
    /// A size or a count.
    Number(usize),
    /// An element type.
    DType(DType),
    /// A KV format.
    Format(KvFormat),
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::DType(dtype) => dtype.fmt(f),
            Self::Format(format) => format.fmt(f),
        }
    }
}

impl From<usize> for Compared {
    fn from(number: usize) -> Self {
        Self::Number(number)
    }
}

impl From<DType> for Compared {
    fn from(dtype: DType) -> Self {
        Self::DType(dtype)
    }
}

impl From<KvFormat> for Compared {
    fn from(format: KvFormat) -> Self {
        Self::Format(format)
    }
}

impl Error {
    /// Returns the error for two values that must be equal but differ.
    pub fn mismatch(what: &'static str, expected: impl Into<Compared>, got: impl Into<Compared>) -> Self {
        Self::Mismatch { what, expected: expected.into(), got: got.into() }
    }

    /// Returns the error for a value that is not below `limit`.
    pub(crate) fn range(what: &'static str, value: impl TryInto<i128>, limit: impl TryInto<i128>) -> Self {
        Self::OutOfRange {
            what,
            value: value.try_into().unwrap_or(i128::MAX),
            limit: limit.try_into().unwrap_or(i128::MAX),
        }
    }

    /// Returns the error for a value above `most`.
    pub(crate) fn too_large(what: &'static str, value: impl TryInto<i128>, most: impl TryInto<i128>) -> Self {
        Self::TooLarge {
            what,
            value: value.try_into().unwrap_or(i128::MAX),
            most: most.try_into().unwrap_or(i128::MAX),
        }
    }
}

/// A result whose error type defaults to [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Checks that `expected == got`. Otherwise returns an [`Error::Mismatch`] that names `what`.
pub(crate) fn same<T: PartialEq + Into<Compared>>(what: &'static str, expected: T, got: T) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::mismatch(what, expected, got)) }
}

/// Returns the product of `factors`, or [`Error::Overflow`] if it does not fit in an `isize`.
pub(crate) fn product(what: &'static str, factors: &[usize]) -> Result<usize> {
    factors
        .iter()
        .try_fold(1usize, |a, &b| a.checked_mul(b))
        .filter(|&n| isize::try_from(n).is_ok())
        .ok_or(Error::Overflow { what })
}
