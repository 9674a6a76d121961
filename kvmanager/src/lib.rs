//! Managers for engines that use IDs instead of guards. They are built on the public API of [`kvcore`].
//!
//! ```text
//!   an engine that has …                        uses               instead of
//!   its own block lists                         BlockManager       kvcore::BlockPool and its guards
//!   sequence IDs, dense tensors                 PagedSequences     kvcore::PagedKvCache
//!   request IDs, tiers, dashboards              StorageManager     kvcore::BlockPool
//!   a model split into pipeline stages          RankCache          a single arena
//! ```
//!
//! In the Python module `kvcache`, these managers have the names that the project's first documents use:
//! `BlockManager`, `PagedKVCache`, `KvStorageManager` and `KVCache`.
//!
//! The types of `kvcore`'s guards rule out incorrect frees, writes to shared blocks, and leaks. The managers
//! hold these guards internally, and report such mistakes as errors ([`Error::NotAllocated`],
//! [`Error::UnknownRequest`]). Build a new engine on the guards, and use a manager for an engine whose
//! scheduler already has IDs.
//!
//! ```
//! use kvcore::BlockPool;
//! use kvmanager::StorageManager;
//!
//! let manager = StorageManager::new(BlockPool::new(0..100)?);
//! manager.reserve(1, 90)?;
//! assert_eq!(manager.available_count(), 10);
//! manager.release(1)?;
//! # Ok::<(), kvmanager::Error>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `blocks` | [`BlockManager`]: blocks that are allocated and freed by ID |
//! | `sequences` | [`PagedSequences`]: sequences with IDs, written layer by layer |
//! | `requests` | [`StorageManager`]: blocks that are reserved by request |
//! | `metrics` | [`PoolMetrics`]: the state of a pool, the latencies of its manager, and goals for both |
//! | `state` | [`BlockState`]: the states of a block, with the names that operators know |
//! | `tier` | [`TierThresholds`]: thresholds for offloading and prefetching blocks; [`TierMoves`]: the pieces to move |
//! | `ranks` | [`RankCache`], [`PrefillPlan`], [`ReceivedMatrix`]: caches of pipeline stages, and merging them |
//! | `rows` | copies of rows out of an arena |
//! | `error` | [`Error`] |

#![forbid(unsafe_code)]

mod blocks;
mod error;
mod metrics;
mod ranks;
mod requests;
mod rows;
mod sequences;
mod state;
mod tier;

pub use blocks::BlockManager;
pub use error::{Error, Result};
pub use metrics::PoolMetrics;
pub use ranks::{PiecePlace, PrefillPlan, RankCache, ReceivedMatrix};
pub use requests::StorageManager;
pub use sequences::{DEFAULT_MAX_BLOCKS, PagedSequences};
pub use state::BlockState;
pub use tier::{Tier, TierMoves, TierThresholds};
