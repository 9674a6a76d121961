//! The states of blocks, with the names that operators know.

use kvcore::PoolCounts;

/// The state of a block for display, with the names that NVIDIA Dynamo's KV manager uses.
///
/// | here | in [`kvcore`] | a block leaves the state by |
/// |---|---|---|
/// | `Available` | Free | being reserved |
/// | `Reserved` | Mutable: being filled | being completed or released |
/// | `InUse` | Shared: filled, with at least one holder | losing its last holder |
/// | `Cached` | Cached: without holders, contents kept | being found again or evicted |
///
/// Every block is in exactly one state.
///
/// ```
/// use kvcore::BlockPool;
/// use kvmanager::BlockState;
/// let pool = BlockPool::new(0..4)?;
/// let reserved = pool.allocate(3)?;
/// let counts = BlockState::ALL.map(|state| (state.name(), state.count(&pool.counts())));
/// assert_eq!(counts, [("available", 1), ("reserved", 3), ("in_use", 0), ("cached", 0)]);
/// # drop(reserved);
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// The block is free.
    Available,
    /// The block is allocated and being filled.
    Reserved,
    /// The block is filled and has at least one holder.
    #[doc(alias = "Shared")]
    InUse,
    /// The block has no holders, but its contents are kept.
    Cached,
}

impl BlockState {
    /// All states, in the order of the lifecycle.
    pub const ALL: [Self; 4] = [Self::Available, Self::Reserved, Self::InUse, Self::Cached];

    /// Returns the name of the state in tables and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::Reserved => "reserved",
            Self::InUse => "in_use",
            Self::Cached => "cached",
        }
    }

    /// Returns the number of a pool's blocks that are in this state.
    pub const fn count(self, counts: &PoolCounts) -> usize {
        match self {
            Self::Available => counts.free,
            Self::Reserved => counts.mutable,
            Self::InUse => counts.shared,
            Self::Cached => counts.cached,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcore::{BlockPool, KeyScope};

    #[test]
    fn every_block_is_in_one_state_through_its_life() {
        let pool = BlockPool::new(0..4).unwrap();
        let states = || BlockState::ALL.map(|state| state.count(&pool.counts()));
        assert_eq!(states(), [4, 0, 0, 0]);
        let reserved = pool.allocate(2).unwrap();
        assert_eq!(states(), [2, 2, 0, 0]);
        let root = KeyScope::new("m", b"").root();
        let shared = reserved.register(None, &[root.child(&[1]), root.child(&[2])]).unwrap();
        assert_eq!(states(), [2, 0, 2, 0]);
        drop(shared);
        assert_eq!(states(), [2, 0, 0, 2]);
    }
}
