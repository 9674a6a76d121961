//! The number of a pool's blocks in each state.

/// The number of blocks in each state: `free + mutable + shared + cached = total`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PoolCounts {
    /// Number of blocks in the pool.
    pub total: usize,
    /// Number of blocks without contents or holders.
    pub free: usize,
    /// Number of blocks being filled.
    pub mutable: usize,
    /// Number of blocks with at least one holder.
    pub shared: usize,
    /// Number of blocks without holders whose contents are kept.
    pub cached: usize,
    /// Number of cached blocks that have no pins, so that the pool may evict them.
    pub evictable: usize,
}

impl PoolCounts {
    /// Returns the number of blocks that can be allocated: free and evictable blocks.
    pub fn available(&self) -> usize {
        self.free + self.evictable
    }

    /// Returns the share of blocks that are not free, between 0 and 1, or 0 for an empty pool. Counts
    /// cached blocks as used, unlike the `PoolMetrics` of `kvmanager`.
    pub fn utilization(&self) -> f64 {
        if self.total == 0 { 0.0 } else { (self.total - self.free) as f64 / self.total as f64 }
    }
}

impl std::iter::Sum for PoolCounts {
    /// Adds up the counts of several pools.
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |a, b| Self {
            total: a.total + b.total,
            free: a.free + b.free,
            mutable: a.mutable + b.mutable,
            shared: a.shared + b.shared,
            cached: a.cached + b.cached,
            evictable: a.evictable + b.evictable,
        })
    }
}
