//! Plans the positions of a prompt's parts, and places stored chunks at these positions.

mod merged;
mod plan;
mod reindex;
mod stored;

pub use merged::MergedRun;
pub use plan::{ChunkPlace, PositionPlan};
pub use reindex::{PlacedPiece, PositionReindexer};
pub(crate) use stored::Stored;
