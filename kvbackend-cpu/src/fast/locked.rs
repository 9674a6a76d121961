//! The parts of storages that an operation reads and writes, locked together. One part may be read and written.

use kvcore::Result;
use smallvec::SmallVec;

use crate::memory::{Access, CpuStorage, LockedBytes, Span, not_locked};
use crate::raw::{Origin, Target};

/// Locked parts of storages, which several threads may use at the same time.
pub(super) struct Locked<'a>(SmallVec<[LockedPart<'a>; 8]>);

struct LockedPart<'a> {
    storage: &'a CpuStorage,
    origin: Origin<'a>,
    target: Option<Target<'a>>,
}

/// Locks all parts and calls `work` with them.
pub(super) fn with_locked<R>(
    reads: &[&Span<'_>],
    writes: &[&Span<'_>],
    work: impl FnOnce(&Locked<'_>) -> Result<R>,
) -> Result<R> {
    let mut access = Access::new(reads, writes)?;
    let parts = access.windows().map(|(storage, bytes)| match bytes {
        LockedBytes::Read(bytes) => LockedPart { storage, origin: Origin::of(bytes), target: None },
        LockedBytes::Write(bytes) => {
            let target = Target::of(bytes);
            LockedPart { storage, origin: target.as_origin(), target: Some(target) }
        }
    });
    work(&Locked(parts.collect()))
}

impl<'a> Locked<'a> {
    fn find(&self, span: &Span<'_>) -> Result<&LockedPart<'a>> {
        let storage = span.storage()?;
        let holds =
            |part: &&LockedPart<'_>| std::ptr::eq(part.storage, storage) && part.origin.holds(span.bytes());
        self.0.iter().find(holds).ok_or_else(not_locked)
    }

    /// Returns locked bytes, for reading.
    pub(super) fn origin(&self, span: &Span<'_>) -> Result<Origin<'a>> {
        self.find(span).map(|part| part.origin)
    }

    /// Returns bytes that are locked for writing.
    pub(super) fn target(&self, span: &Span<'_>) -> Result<Target<'a>> {
        self.find(span)?.target.ok_or_else(not_locked)
    }
}
