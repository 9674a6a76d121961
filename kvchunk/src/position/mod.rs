//! Positions: plans the places of a prompt's parts, and places stored chunks.

mod merged;
mod plan;
mod reindex;
mod stored;

pub use merged::MergedRun;
pub use plan::{ChunkPlace, PositionPlan};
pub use reindex::{PlacedPiece, PositionReindexer};
pub(crate) use stored::Stored;
