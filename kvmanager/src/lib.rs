//! Managers for engines that think in numbers instead of guards, built on the public API of [`kvcore`] alone.
//!
//! ```text
//!   an engine that keeps …                      takes                    instead of
//!   block lists of its own                      BlockManager             kvcore::BlockPool and its guards
//!   sequences by number, dense tensors          PagedSequences, DenseKv  kvcore::PagedKvCache
//!   blocks by request, tiers, dashboards        StorageManager           kvcore::BlockPool
//!   the kind of cache in a configuration file   CacheChoice              one of kvcore's caches
//!   a model split among pipeline stages         RankCache, PieceMerger   one arena
//!   a model split among devices of one process  SpannedArena             kvcore::KvArena
//! ```
//!
//! The guards of `kvcore` make a wrong free, a write into a shared block and a leak impossible by type. The managers
//! here keep the guards inside, so that the same mistakes are errors ([`Error::NotAllocated`],
//! [`Error::UnknownRequest`]). A new engine takes the guards; an engine whose scheduler already has numbers takes a
//! manager.
//!
//! ```
//! use kvcore::BlockPool;
//! use kvmanager::{RequestId, StorageManager};
//!
//! let manager = StorageManager::new(BlockPool::new(0..100)?);
//! manager.reserve(RequestId(1), 90)?;
//! assert_eq!(manager.available_count(), 10);
//! manager.release(RequestId(1))?;
//! # Ok::<(), kvmanager::Error>(())
//! ```

#![forbid(unsafe_code)]

mod blocks;
mod choice;
mod error;
mod metrics;
mod ranks;
mod requests;
mod rows;
mod sequences;
mod single;
mod spanned;
mod state;
mod tier;

pub use blocks::{BlockManager, BlockManagerConfig};
pub use choice::CacheChoice;
pub use error::{Error, Result};
pub use metrics::PoolMetrics;
pub use ranks::{Piece, PieceMerger, PiecePlace, PrefillPlan, RankCache, ReceivedMatrix};
pub use requests::{RequestId, StorageManager};
pub use sequences::{DEFAULT_MAX_BLOCKS, PagedSequences};
pub use single::{DenseKv, DenseSequence, SingleSequence};
pub use spanned::{Placement, SpannedArena, SpannedPart};
pub use state::BlockState;
pub use tier::{Tier, TierAction, TierThresholds};
