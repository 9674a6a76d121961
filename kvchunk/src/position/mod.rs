//! Positions: plans where a prompt's parts go, and places stored chunks there.

mod merged;
mod plan;
mod reindex;
mod stored;

pub use merged::MergedRun;
pub use plan::{ChunkPlace, PositionPlan};
pub use reindex::{PlacedPiece, PositionReindexer};
pub(crate) use stored::Stored;
