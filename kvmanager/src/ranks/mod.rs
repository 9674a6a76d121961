//! Caches of pipeline stages, and merging the pieces that the stages compute.
//!
//! ```text
//!               chunk 0      chunk 1      chunk 2        tokens ──►
//!             ┌────────────┬────────────┬────────────┐
//!    stage 0  │ layers 0.. │            │            │   RankCache::append_sequence: along the tokens
//!             ├────────────┼────────────┼────────────┤
//!    stage 1  │ layers 12..│   a piece  │            │   RankCache::accept: any piece, in any order
//!             ├────────────┼────────────┼────────────┤
//!    stage 2  │ layers 24..│            │            │   ReceivedMatrix: the pieces that have arrived
//!             └────────────┴────────────┴────────────┘
//!               RankCache::merge_from_ranks: one column at a time
//! ```
//!
//! Merging by layer gives a rank the layers of other stages for the same tokens, and never lengthens the
//! sequence. Appending along the sequence puts consecutive chunks of the same layers one after another. A
//! [`PrefillPlan`] is the grid of stages and chunks.

mod cache;
mod matrix;
mod plan;

pub use cache::RankCache;
pub use matrix::ReceivedMatrix;
pub use plan::{PiecePlace, PrefillPlan};
