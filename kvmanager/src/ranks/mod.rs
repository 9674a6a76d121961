//! Several ranks: their shares of a model's heads, layers and batch entries, and the merge of the cache
//! pieces that they compute.
//!
//! ```text
//!               chunk 0      chunk 1      chunk 2        tokens ──►
//!             ┌────────────┬────────────┬────────────┐
//!    stage 0  │ layers 0.. │            │            │   RankCache::append_sequence: along the tokens
//!             ├────────────┼────────────┼────────────┤
//!    stage 1  │ layers 12..│   a Piece  │            │   PieceMerger::accept: any piece, in any order
//!             ├────────────┼────────────┼────────────┤
//!    stage 2  │ layers 24..│            │            │   ReceivedMatrix: which ones have come
//!             └────────────┴────────────┴────────────┘
//! ```
//!
//! [`PieceMerger::exchange`] moves the pieces of a chunk between ranks through a communicator.
//!
//! Merging by layer gives a rank the layers of other stages for the same tokens and never lengthens the
//! sequence. Merging along the sequence puts consecutive chunks of the same layers after one another. A
//! [`PrefillPlan`] is the grid of both.

mod cache;
mod matrix;
mod merge;
mod plan;

pub use cache::RankCache;
pub use matrix::ReceivedMatrix;
pub use merge::{Piece, PieceMerger};
pub use plan::{PiecePlace, PrefillPlan};
