//! The error type of this crate.

use std::time::Duration;

use crate::replica::ReplicaId;

/// What can go wrong between a prompt and its placed chunks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A part of a chunked prompt holds nothing.
    #[error("{part} is empty; a chunked prompt is system, chunks and question, none of them empty")]
    EmptyPart {
        /// `"system prompt"`, `"chunk 2"`, `"question"`.
        part: String,
    },
    /// An empty separator would split everywhere.
    #[error("the separator is empty and would split everywhere; give it at least one character, such as ##")]
    EmptySeparator,
    /// A prompt whose largest position the model does not have.
    #[error("the prompt needs position {largest}, the model has {limit} (0..{limit}); shorten it")]
    TooLong {
        /// Largest position of the prompt.
        largest: i64,
        /// Positions that the model has.
        limit: usize,
    },
    /// A configuration value out of its domain.
    #[error("{what} must be at least 1")]
    Zero {
        /// The value.
        what: &'static str,
    },
    /// A number that must be above 0.
    #[error("{what} is {value}; it must be above 0")]
    NotPositive {
        /// The number's name.
        what: &'static str,
        /// The number.
        value: f32,
    },
    /// A commit before everything is there.
    #[error("{pieces} pieces of the prompt are being computed by other requests; advance until it is ready")]
    NotReady {
        /// Pieces.
        pieces: usize,
    },
    /// A recompute strategy chose a token that is not there.
    #[error(
        "token {token} of chunk {chunk} was chosen for recomputation, but the chunk has {len}; \
         a strategy may choose 0..{len}"
    )]
    NoSuchToken {
        /// The chunk, counted from 0.
        chunk: usize,
        /// The token in it.
        token: usize,
        /// Tokens of the chunk.
        len: usize,
    },
    /// A recompute strategy that is none.
    #[error(
        "{0:?} is no recompute strategy: none, link:K, blend:R[@LAYER][:keys|values|both], random:R[@SEED], full"
    )]
    UnknownStrategy(String),
    /// A form of sleep that is none.
    #[error(
        "{0:?} is no form of sleep: plain, compressed, int8[:GROUP], int4[:GROUP], fp8-e4m3[:head] and \
         fp8-e5m2[:head] are"
    )]
    UnknownSleepForm(String),
    /// A share that is none.
    #[error("{what} is {value}; it must be above 0 and below 1")]
    NotAShare {
        /// The value's name.
        what: &'static str,
        /// The value.
        value: f64,
    },
    /// An arena that cannot be cut in two pools.
    #[error("{blocks} blocks cannot be cut into a main pool and a chunk pool: 2 to 2^32 - 1 are needed")]
    NoRoomForTwoPools {
        /// Blocks of the arena.
        blocks: usize,
    },
    /// A tenant that was never added.
    #[error("tenant {0:?} is unknown; add it first")]
    UnknownTenant(String),
    /// A tenant's tag that is taken.
    #[error("tenant {0:?} is there already; ask for it by its tag, or add another tag")]
    TenantExists(String),
    /// A tenant's salt that another one has, or that is empty, as the default tenant's is.
    #[error(
        "tenant {tag:?} has the salt of tenant {other:?}, so that they would share chunks; give it its own"
    )]
    SharedSalt {
        /// The tenant that is refused.
        tag: String,
        /// The one that is there.
        other: String,
    },
    /// A cache that was built without a [`SleepStore`](crate::SleepStore).
    #[error("this chunk cache has no place to sleep; build it with one")]
    NoSleep,
    /// A run of tokens that is no single segment for whoever goes by position.
    #[error("token {index} of the run has position {position}; one segment cannot say so")]
    NotInARow {
        /// The first token whose position is not its index.
        index: i64,
        /// Its position.
        position: i64,
    },
    /// A rank that did not come to an agreement.
    #[error("a rank has left, or did not answer within {limit:?}; end the request on all ranks")]
    RankLost {
        /// How long the others wait.
        limit: Duration,
    },
    /// A prompt for which another rank has no room.
    #[error("another rank cannot compute this prompt; its own error says why")]
    RankFailed,
    /// Ranks that assemble different prompts.
    #[error("ranks compute different prompts: {own} flags to agree on here, {others} elsewhere")]
    RanksDiffer {
        /// Flags of this rank.
        own: usize,
        /// Flags of another one.
        others: usize,
    },
    /// A replica that has a chunk no more.
    #[error("{replica} has the chunk no more; ask another one, or compute it")]
    ReplicaLacks {
        /// The replica.
        replica: ReplicaId,
    },
    /// A replica that cannot be reached, or does not answer.
    #[error("{replica} gave nothing: {reason}; ask another one, or compute the chunk")]
    ReplicaFailed {
        /// The replica.
        replica: ReplicaId,
        /// What the transport says.
        reason: String,
    },
    /// Contents of another replica that are not what was asked for, or do not lie as here.
    #[error(
        "what a replica sent has another {what} than this one needs; run replicas of one model and setup"
    )]
    ReplicaDiffers {
        /// What differs.
        what: &'static str,
    },
    /// Replicas under a hash that anybody can make collisions of.
    #[error("replicas share no chunks under a hash that does not resist collisions; take blake3 or sha256")]
    WeakHash,
    /// No room for a chunk, even after evicting what nobody holds.
    #[error("no room for a chunk of {blocks} blocks; give chunks more memory, or let requests end")]
    NoRoomForChunk {
        /// Blocks that it takes.
        blocks: usize,
    },
    /// A chunk that another request has been at for too long.
    #[error("another request has computed or moved the chunk for {limit:?}; ask again, or compute it")]
    StillBusy {
        /// Longest wait.
        limit: Duration,
    },
    /// A place to sleep that is full.
    #[error(
        "no room to sleep: {asked} bytes asked, {free} of {limit} free; give sleep more memory or a smaller \
         form, or clear chunks"
    )]
    SleepFull {
        /// Bytes asked for.
        asked: usize,
        /// Bytes free.
        free: usize,
        /// Bytes in all.
        limit: usize,
    },
    /// Saved contents that do not read back as they were.
    #[error("saved chunk is damaged: {0}; compute it anew, which the next request for it does by itself")]
    Damaged(String),
    /// A pool that cannot sleep while it is in use.
    #[error(
        "the chunk pool is in use: {held} pieces are held, {flights} are being computed or moved, \
         {others} blocks are held by others; let these requests end first"
    )]
    PoolInUse {
        /// Pieces that requests hold.
        held: usize,
        /// Pieces that are computed, put to sleep or woken at this moment.
        flights: usize,
        /// Blocks that belong to neither: of pieces that were not kept, or taken from the pool directly.
        others: usize,
    },
    /// A pool that sleeps already.
    #[error("the chunk pool sleeps already; wake it before putting it to sleep again")]
    PoolAsleep,
    /// A pool that another thread puts to sleep or wakes.
    #[error("the chunk pool is being put to sleep or woken by another thread; ask again")]
    PoolMoving,
    /// From the structures below.
    #[error(transparent)]
    Core(#[from] kvcore::Error),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
