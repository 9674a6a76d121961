//! The error type of this crate.

use std::time::Duration;

use crate::config::ComputeMode;
use crate::replica::ReplicaId;

/// An error from this crate: from splitting or assembling a prompt, or from the chunk cache.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A part of a chunked prompt is empty, or the prompt has no chunks.
    #[error(
        "{part} is empty; a chunked prompt needs chunks and a question, and no text between separators may be empty"
    )]
    EmptyPart {
        /// The name of the part, such as `"chunk 2"` or `"question"`.
        part: String,
    },
    /// The separator is empty, so it would split the string everywhere.
    #[error(
        "the separator is empty and would split the text everywhere; give it at least one character, such as ##"
    )]
    EmptySeparator,
    /// The prompt needs a position that the model does not support.
    #[error(
        "the prompt needs position {largest}, but the model has only {limit} positions; shorten the prompt"
    )]
    TooLong {
        /// The largest position that the prompt needs.
        largest: i64,
        /// Number of positions that the model supports.
        limit: usize,
    },
    /// A setting that must be at least 1 is 0.
    #[error("{what} must be at least 1")]
    Zero {
        /// The name of the setting.
        what: &'static str,
    },
    /// A number is not positive and finite, although it must be.
    #[error("{what} is {value}; it must be above 0")]
    NotPositive {
        /// The name of the number.
        what: &'static str,
        /// The number.
        value: f32,
    },
    /// An assembly was committed before all its pieces were ready.
    #[error(
        "the prompt is not ready, because other requests are computing {pieces} of its pieces; advance it, or drop it if \
         there is an error"
    )]
    NotReady {
        /// The number of pieces that other requests are still computing.
        pieces: usize,
    },
    /// A recompute strategy selected a token that the chunk does not have.
    #[error(
        "token {token} of chunk {chunk} was chosen for recomputation, but the chunk has {len}; \
         a strategy may choose 0..{len}"
    )]
    NoSuchToken {
        /// The zero-based index of the chunk in the prompt.
        chunk: usize,
        /// The index of the token in the chunk.
        token: usize,
        /// The number of tokens in the chunk.
        len: usize,
    },
    /// The string is not the name of a recompute strategy.
    #[error(
        "{0:?} is not a recompute strategy; use none, link:K, blend:R[@LAYER][:keys|values|both], \
         question:R[@LAYER], joint:R[@LAYER][:keys|values|both], random:R[@SEED] or full; \
         R is a fraction of the tokens, from 0 to 1"
    )]
    UnknownStrategy(String),
    /// The string is not the name of a compute mode.
    #[error(
        "{0:?} is not a compute mode; use with-system, alone, sink:TOKENS, behind:DECOYS or slots:SLOTS, with at \
         least one"
    )]
    UnknownMode(String),
    /// The compute mode needs more decoys than the prompt has.
    #[error(
        "{mode} needs {} decoys, and there are {given}; pass more decoys, or use a smaller number", mode.num_decoys()
    )]
    FewDecoys {
        /// The mode.
        mode: ComputeMode,
        /// The number of decoys that the prompt has.
        given: usize,
    },
    /// The prompt has more chunks than slots.
    #[error(
        "slots:{slots} has a slot for each of {slots} documents, and there are {chunks}; use slots:{chunks} or more, \
         or behind:{slots}"
    )]
    FewSlots {
        /// The number of slots.
        slots: u32,
        /// The number of chunks in the prompt.
        chunks: usize,
    },
    /// The string is not the name of a form of sleep.
    #[error(
        "{0:?} is not a sleep form; use plain, compressed, int8[:GROUP], int4[:GROUP], fp8-e4m3[:head] or \
         fp8-e5m2[:head]"
    )]
    UnknownSleepForm(String),
    /// A fraction is not above 0 and below 1.
    #[error("{what} is {value}; it must be above 0 and below 1")]
    NotAShare {
        /// The name of the value.
        what: &'static str,
        /// The value.
        value: f64,
    },
    /// An arena is too small, or too large, to be split into a main pool and a chunk pool.
    #[error("{blocks} blocks cannot be split into a main pool and a chunk pool: 2 to 2^32 - 1 are needed")]
    NoRoomForTwoPools {
        /// The number of blocks in the arena.
        blocks: usize,
    },
    /// No tenant has this tag.
    #[error("tenant {0:?} is unknown; add it first")]
    UnknownTenant(String),
    /// A tenant with this tag already exists.
    #[error("tenant {0:?} already exists; look it up by its tag, or choose another tag")]
    TenantExists(String),
    /// Two tenants would have the same salt. The default tenant's salt is empty, so an empty salt is rejected
    /// too.
    #[error(
        "tenant {tag:?} has the same salt as tenant {other:?}, so the two would share chunks; use a different salt"
    )]
    SharedSalt {
        /// The tag of the rejected tenant.
        tag: String,
        /// The tag of the existing tenant with the same salt.
        other: String,
    },
    /// The cache was built without a [`SleepStore`](crate::SleepStore).
    #[error("this chunk cache has no sleep store; create it with a sleep store")]
    NoSleep,
    /// The tokens of a run do not have consecutive positions, so one segment cannot describe the run.
    #[error("token {index} of the run has position {position}; one segment cannot describe this")]
    NotInARow {
        /// The index of the first token whose position differs from its index.
        index: i64,
        /// The position of that token.
        position: i64,
    },
    /// Another rank cannot compute the prompt, for example because it has no room.
    #[error("another rank cannot compute this prompt; see the error on that rank")]
    RankFailed,
    /// A replica no longer has a chunk.
    #[error("{replica} no longer has the chunk; ask another replica, or compute the chunk")]
    ReplicaLacks {
        /// The replica.
        replica: ReplicaId,
    },
    /// A replica cannot be reached or does not answer.
    #[error("{replica} did not return the chunk: {reason}; ask another replica, or compute the chunk")]
    ReplicaFailed {
        /// The replica.
        replica: ReplicaId,
        /// The reason given by the transport.
        reason: String,
    },
    /// A parcel from another replica is not the requested piece, or its layout differs from the layout of the
    /// local blocks.
    #[error(
        "a replica's parcel and this replica differ in the {what}; run all replicas with the same model and settings"
    )]
    ReplicaDiffers {
        /// The name of the property that differs.
        what: &'static str,
    },
    /// The hash is not collision-resistant, so replicas cannot share chunks with it.
    #[error("replicas cannot share chunks with a hash that is not collision-resistant; use blake3 or sha256")]
    WeakHash,
    /// The pool has no room for a chunk, even if every piece without holders were evicted.
    #[error(
        "no room for a chunk of {blocks} blocks; give chunks more memory, or wait for requests to finish"
    )]
    NoRoomForChunk {
        /// The number of blocks that the chunk needs.
        blocks: usize,
    },
    /// Another request has been computing or moving the chunk for too long.
    #[error(
        "another request has been computing or moving the chunk for {limit:?}; try again, or compute the chunk"
    )]
    StillBusy {
        /// The maximum time to wait.
        limit: Duration,
    },
    /// The memory for sleeping pieces is full.
    #[error(
        "no room to put chunks to sleep: {asked} bytes needed, {free} of {limit} bytes free; raise the memory limit, use \
         a smaller sleep form, or clear chunks"
    )]
    SleepFull {
        /// The number of bytes that were needed.
        asked: usize,
        /// The number of bytes that were free.
        free: usize,
        /// The budget in bytes.
        limit: usize,
    },
    /// The saved or received contents of a chunk do not match their checksum or digest.
    #[error("the contents of a chunk are damaged: {0}; the next request for the chunk recomputes it")]
    Damaged(String),
    /// A [`SleepStore`](crate::SleepStore) panicked while it saved or restored a chunk.
    #[error(
        "the sleep store panicked; chunks that were being saved stay awake, and chunks that were being woken are \
         recomputed"
    )]
    StorePanicked,
    /// The chunk pool is in use and cannot be put to sleep.
    #[error(
        "the chunk pool is in use: {held} pieces are held, {flights} are being computed or moved, \
         {others} blocks are held by others; wait for these requests to finish"
    )]
    PoolInUse {
        /// The number of pieces that requests hold.
        held: usize,
        /// The number of pieces that are being computed, put to sleep or woken.
        flights: usize,
        /// The number of other blocks in use: blocks of pieces that were not kept, and blocks taken directly
        /// from the pool.
        others: usize,
    },
    /// The chunk pool is already asleep.
    #[error("the chunk pool is already asleep; wake it before putting it to sleep again")]
    PoolAsleep,
    /// Another thread is putting the chunk pool to sleep or waking it.
    #[error("another thread is putting the chunk pool to sleep or waking it; try again")]
    PoolMoving,
    /// An error from `kvcore`.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// A result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
