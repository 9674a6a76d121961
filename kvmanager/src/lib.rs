//! Managers for engines that use IDs instead of guards, built on the public API of [`kvcore`].
//!
//! ```text
//!   an engine that keeps …                      takes              instead of
//!   block lists of its own                      BlockManager       kvcore::BlockPool and its guards
//!   sequences by number, dense tensors          PagedSequences     kvcore::PagedKvCache
//!   blocks by request, tiers, dashboards        StorageManager     kvcore::BlockPool
//!   a model split among pipeline stages         RankCache          one arena
//! ```
//!
//! The Python module `kvcache` gives each of them the name of the project's first documents: `BlockManager`,
//! `PagedKVCache`, `KvStorageManager` and `KVCache`.
//!
//! The guards of `kvcore` make a wrong free, a write into a shared block and a leak impossible by type. The managers
//! keep the guards inside, and report these mistakes as errors ([`Error::NotAllocated`], [`Error::UnknownRequest`]).
//! Build a new engine on the guards; take a manager for an engine whose scheduler already has numbers.
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
//! | `blocks` | [`BlockManager`]: blocks by number, written and read one at a time |
//! | `sequences` | [`PagedSequences`]: sequences by number, written layer by layer |
//! | `requests` | [`StorageManager`]: blocks by request |
//! | `metrics` | [`PoolMetrics`]: the state of a pool and the latencies of a manager, with their goals |
//! | `state` | [`BlockState`]: the states of a block under the names that operators know |
//! | `tier` | [`TierThresholds`]: when to offload blocks, and when to load them early |
//! | `ranks` | [`RankCache`], [`PrefillPlan`], [`ReceivedMatrix`]: caches of pipeline stages, and their merge |
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
pub use tier::{Tier, TierThresholds};
