//! Positions: where parts stand, and placing stored chunks there.

mod merged;
mod plan;
mod reindex;

pub use merged::MergedKvCache;
pub use plan::{ChunkPlace, PositionPlan};
pub(crate) use reindex::Stored;
pub use reindex::{PositionReindexer, ReindexedChunkKv};
