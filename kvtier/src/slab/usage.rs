//! What a slab contains, and what it has done.

use serde::Serialize;

use super::{Group, Slab};
use crate::record::AccountId;

/// The contents of a slab, and what it has done since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SlabUsage {
    /// The number of bytes in cells that contain records or are set aside.
    pub bytes: u64,
    /// The size of the file in bytes, which is at most the limit.
    pub limit_bytes: u64,
    /// The number of records.
    pub records: usize,
    /// The number of bytes of records in host memory.
    pub memory_bytes: u64,
    /// The largest number of bytes of records in host memory.
    pub memory_limit_bytes: u64,
    /// Loads that host memory has served.
    pub memory_hits: u64,
    /// Loads that returned a record, from host memory or from the disk.
    pub hits: u64,
    /// Loads that returned none, for any reason.
    pub misses: u64,
    /// Loads of a record with other tokens, another stored start or another label.
    pub differs: u64,
    /// Loads of a record whose bytes had changed.
    pub damaged: u64,
    /// Loads that ended at their deadline.
    pub deadline_exceeded: u64,
    /// Loads that were skipped, because computing takes less time.
    pub loads_skipped_slower: u64,
    /// Loads that the disk refused.
    pub read_errors: u64,
    /// Batches and checkpoints that the disk refused.
    pub write_errors: u64,
    /// Batches that were given up, because the disk had not ended a write at its deadline.
    pub write_deadline_exceeded: u64,
    /// Records that were not stored: the queue was full, they did not fit, their parent had left, or the disk was
    /// late.
    pub stores_dropped: u64,
    /// Records that were evicted.
    pub evicted: u64,
}

/// The use of a disk by a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct AccountUsage {
    /// The number of bytes in cells that contain records of the tenant, or will when they are written.
    pub bytes: u64,
    /// The number of records.
    pub records: usize,
    /// The largest number of bytes, if there is a limit.
    pub limit_bytes: Option<u64>,
    /// Records that were evicted since the slab was opened.
    pub evicted: u64,
}

/// What a slab has done.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) differs: u64,
    pub(super) damaged: u64,
    pub(super) deadline_exceeded: u64,
    pub(super) loads_skipped_slower: u64,
    pub(super) read_errors: u64,
    pub(super) write_errors: u64,
    pub(super) write_deadline_exceeded: u64,
    pub(super) stores_dropped: u64,
}

impl Slab {
    /// Returns what the slab contains, and what it has done.
    pub fn usage(&self) -> SlabUsage {
        self.shared.give_up_late_writes();
        let state = self.shared.state.lock();
        let ((records, cells), evicted) = (state.used(), state.evicted);
        drop(state);
        let memory = self.shared.memory.usage();
        let counts = self.shared.counts.lock();
        SlabUsage {
            bytes: u64::from(cells) * self.shared.geometry.cell_bytes() as u64,
            limit_bytes: self.shared.geometry.file_bytes(),
            records,
            memory_bytes: memory.bytes as u64,
            memory_limit_bytes: self.shared.config.memory_bytes as u64,
            memory_hits: memory.hits,
            hits: counts.hits,
            misses: counts.misses,
            differs: counts.differs,
            damaged: counts.damaged,
            deadline_exceeded: counts.deadline_exceeded,
            loads_skipped_slower: counts.loads_skipped_slower,
            read_errors: counts.read_errors,
            write_errors: counts.write_errors,
            write_deadline_exceeded: counts.write_deadline_exceeded,
            stores_dropped: counts.stores_dropped,
            evicted,
        }
    }

    /// Returns what a tenant has on the disk. Records of other models, tokenizers and formats do not count.
    pub fn account(&self, account: AccountId) -> AccountUsage {
        let cell_bytes = self.shared.geometry.cell_bytes() as u64;
        let account = self.shared.state.lock().accounts.get(Group::Own(account));
        AccountUsage {
            bytes: u64::from(account.cells) * cell_bytes,
            records: account.records,
            limit_bytes: account.limit.map(|cells| u64::from(cells) * cell_bytes),
            evicted: account.evicted,
        }
    }

    /// Limits the number of bytes of a tenant's records, in whole cells, or removes its limit. From this call on, the
    /// limit holds at every instant: what is above it leaves now. Without a limit, a tenant may use the whole slab.
    pub fn limit_account(&self, account: AccountId, bytes: Option<u64>) {
        let cells =
            |bytes: u64| u32::try_from(bytes / self.shared.geometry.cell_bytes() as u64).unwrap_or(u32::MAX);
        self.shared.state.lock().limit(Group::Own(account), bytes.map(cells));
    }
}
