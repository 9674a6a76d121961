//! Tiers of memory: thresholds for moving blocks between them, and the moves of a chunk cache's pieces.
//!
//! ```text
//!   device ── more than 85 % used: the coldest pieces ──► host ── more than 90 % used ──► gone, or on a disk
//!          ◄── heat above 0.70, while there is room ─────
//! ```
//!
//! [`TierThresholds`] make decisions about numbers of blocks, and [`TierMoves`] applies them to the pieces of a
//! chunk cache. Pieces that a disk stores are written when they are computed, so such a piece is still on the disk
//! after it has left host memory.

mod moves;
mod thresholds;

pub use moves::TierMoves;
pub use thresholds::{Tier, TierThresholds};
