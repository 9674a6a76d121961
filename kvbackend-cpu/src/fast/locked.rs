//! Access to the parts of storages that an operation reads or writes, while they are locked. A part may be
//! both read and written.

use kvcore::Result;
use smallvec::SmallVec;

use crate::memory::{Access, ByteSpan, CpuStorage, LockedBytes, not_locked};
use crate::raw::{Destination, Origin};

/// Locked parts of storages, which several threads may use at the same time.
pub(super) struct Locked<'a>(SmallVec<[LockedPart<'a>; 8]>);

struct LockedPart<'a> {
    storage: &'a CpuStorage,
    origin: Origin<'a>,
    target: Option<Destination<'a>>,
}

/// Locks `reads` and `writes` together, and calls `work` with the locked parts.
pub(super) fn with_locked<R>(
    reads: &[&ByteSpan<'_>],
    writes: &[&ByteSpan<'_>],
    work: impl FnOnce(&Locked<'_>) -> Result<R>,
) -> Result<R> {
    let mut access = Access::new(reads, writes)?;
    let parts = access.windows().map(|(storage, bytes)| match bytes {
        LockedBytes::Read(bytes) => LockedPart { storage, origin: Origin::of(bytes), target: None },
        LockedBytes::Write(bytes) => {
            let target = Destination::of(bytes);
            LockedPart { storage, origin: target.as_origin(), target: Some(target) }
        }
    });
    work(&Locked(parts.collect()))
}

impl<'a> Locked<'a> {
    fn find(&self, span: &ByteSpan<'_>) -> Result<&LockedPart<'a>> {
        let storage = span.storage()?;
        let holds =
            |part: &&LockedPart<'_>| std::ptr::eq(part.storage, storage) && part.origin.holds(span.bytes());
        self.0.iter().find(holds).ok_or_else(not_locked)
    }

    /// Returns the bytes of `span`, which must be locked.
    pub(super) fn origin(&self, span: &ByteSpan<'_>) -> Result<Origin<'a>> {
        self.find(span).map(|part| part.origin)
    }

    /// Returns the bytes of `span`, which must be locked for writing.
    pub(super) fn target(&self, span: &ByteSpan<'_>) -> Result<Destination<'a>> {
        self.find(span)?.target.ok_or_else(not_locked)
    }
}
