//! Positions: the places of a prompt's parts, and the placing of stored chunks.

mod merged;
mod plan;
mod reindex;

pub use merged::MergedRun;
pub use plan::{ChunkPlace, PositionPlan};
pub(crate) use reindex::Stored;
pub use reindex::{PlacedPiece, PositionReindexer};
