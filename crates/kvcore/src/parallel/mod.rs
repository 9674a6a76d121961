//! Several ranks: which heads, layers and batch entries of a model are whose.

mod rank;

pub use rank::{HeadShare, RankInfo};
