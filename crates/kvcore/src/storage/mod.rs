//! Memory as an owner sees it: handles to it, its blocks by request, and when a tier is too full.
//!
//! ```text
//!   Backend ──► OwnedStorage ──► TensorView            bytes of one MemoryKind, typed windows into them
//!   BlockPool ─► StorageManager ─► PoolMetrics         blocks by request; counts, latencies, goals
//!                     TierThresholds ─► TierAction     how many blocks to move, and nothing else
//!   Backend ──► ReservedArena ──► SleepingBlocks       memory released, ids and addresses kept
//! ```

mod goals;
mod manager;
mod metrics;
mod state;
mod tier;

pub use goals::{Goal, Target};
pub use manager::{RequestId, StorageManager};
pub use metrics::PoolMetrics;
pub use state::BlockState;
pub use tier::{Tier, TierAction, TierThresholds};
