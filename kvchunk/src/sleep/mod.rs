//! Sleep moves chunks to a memory tier below device memory.
//!
//! Pieces and the whole pool sleep independently of each other:
//!
//! ```text
//!   pieces      cold ──► fall ──► SleepStore (ArenaSleep: host memory) ──► wake ──► other blocks
//!   the pool    sleep_pool ──► memory released, pieces copied ──► wake_pool ──► the same blocks
//! ```
//!
//! When a piece is put to sleep, its blocks become free; a hit wakes it. While the whole pool sleeps, no
//! request uses the cache.
//!
//! - The cache's side: [`fall`] and [`wake`] move pieces, [`cold`] chooses the pieces, and [`pool`] moves the
//!   whole pool.
//! - The store's side: [`store`] is the contract, and [`arena`] implements it. Depending on the [`form`], the
//!   implementation uses [`host`] with [`scales`], or [`compressed`] with [`planes`]. The [`ledger`] tracks
//!   the memory usage.

mod arena;
mod cold;
mod compressed;
mod fall;
mod form;
mod host;
mod ledger;
mod planes;
mod pool;
mod scales;
mod store;
mod wake;

pub use arena::ArenaSleep;
pub use cold::ColdRule;
pub use form::SleepForm;
pub use ledger::SleepUsage;
pub use pool::PoolSleep;
pub(crate) use store::SavedPiece;
pub use store::{SleepStore, Sleeping};
pub use wake::NotWoken;
pub(crate) use wake::Waking;
