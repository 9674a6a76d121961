//! The storages that an operation reads and writes, locked together. One storage may be read and written.

use std::sync::Arc;

use kvcore::{KvPlane, Result, Storage};
use smallvec::SmallVec;

use crate::memory::{Access, not_locked};
use crate::raw::{Origin, Target};

/// Locked storages, each with its address.
pub(super) struct LockedStorages<'a>(SmallVec<[(u64, Origin<'a>, Option<Target<'a>>); 8]>);

/// Locks all storages and calls `work` with them.
pub(super) fn with_locked<R>(
    reads: &[&Arc<dyn Storage>],
    writes: &[&Arc<dyn Storage>],
    work: impl FnOnce(&LockedStorages<'_>) -> Result<R>,
) -> Result<R> {
    let mut access = Access::new(reads, writes)?;
    let mut parts = access.parts();
    let mut locked = SmallVec::new();
    for storage in writes.iter().chain(reads) {
        let address = storage.address();
        if locked.iter().any(|(known, _, _)| *known == address) {
            continue;
        }
        locked.push(if writes.iter().any(|written| written.address() == address) {
            let target = Target::new(parts.write(storage)?);
            (address, target.as_origin(), Some(target))
        } else {
            (address, Origin::new(parts.read(storage)?), None)
        });
    }
    work(&LockedStorages(locked))
}

impl<'a> LockedStorages<'a> {
    fn find(&self, storage: &Arc<dyn Storage>) -> Option<&(u64, Origin<'a>, Option<Target<'a>>)> {
        self.0.iter().find(|(address, _, _)| *address == storage.address())
    }

    pub(super) fn origin(&self, storage: &Arc<dyn Storage>) -> Result<Origin<'a>> {
        let end = self.find(storage).map(|(_, origin, _)| *origin);
        end.ok_or_else(not_locked)
    }

    pub(super) fn target(&self, storage: &Arc<dyn Storage>) -> Result<Target<'a>> {
        let end = self.find(storage).and_then(|(_, _, target)| *target);
        end.ok_or_else(not_locked)
    }
}

/// Returns the storages of a plane.
pub(super) fn storages<'a>(plane: &KvPlane<'a>) -> SmallVec<[&'a Arc<dyn Storage>; 2]> {
    std::iter::once(plane.storage).chain(plane.scales.map(|(storage, _)| storage)).collect()
}
