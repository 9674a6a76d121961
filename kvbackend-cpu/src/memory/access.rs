//! Locks for operations: all parts of storages that an operation uses are locked together.

use std::ops::{Index, IndexMut, Range};
use std::sync::Arc;

use kvcore::{Error, Result, Storage, TensorView};
use smallvec::SmallVec;

use super::ranges::{RangeTurn, RangeUse};
use super::{CpuStorage, LentBytes, cpu};
use crate::NAME;
use crate::element::{Element, elements, elements_mut};

/// A byte range of a storage, for use by an operation.
#[derive(Clone)]
pub(crate) struct ByteSpan<'a> {
    storage: &'a Arc<dyn Storage>,
    bytes: Range<usize>,
}

impl<'a> ByteSpan<'a> {
    pub(crate) fn new(storage: &'a Arc<dyn Storage>, bytes: Range<usize>) -> Self {
        Self { storage, bytes }
    }

    /// Returns the bytes of a view, from its first element to its last.
    pub(crate) fn of(view: &'a TensorView) -> Result<Self> {
        Ok(Self::new(view.storage(), view.extent()?))
    }

    /// Returns the storage of the bytes.
    pub(crate) fn storage(&self) -> Result<&'a CpuStorage> {
        cpu(self.storage)
    }

    /// Returns the range of the bytes in their storage.
    pub(crate) fn bytes(&self) -> &Range<usize> {
        &self.bytes
    }
}

/// A list whose inline capacity is enough for most operations, which avoids heap allocations.
type Few<T> = SmallVec<[T; 8]>;

/// The locks on all bytes that one operation uses.
///
/// Overlapping parts are joined. All parts of one storage are locked together, in order of arrival, and
/// storages are locked in address order. Therefore, operations cannot deadlock: an operation that waits for a
/// storage waits only for earlier uses of this storage, and these wait only for even earlier uses, or for
/// storages that are later in the order.
pub(crate) struct Access<'a> {
    /// The locked parts, sorted by storage and first byte. No two parts of a storage overlap.
    parts: Few<SpanUse<'a>>,
    /// The locked bytes of lent memory.
    lent: SmallVec<[LentBytes<'a>; 4]>,
}

struct SpanUse<'a> {
    storage: &'a CpuStorage,
    range: RangeUse,
    /// The turn in which all parts of the storage were locked.
    turn: RangeTurn,
}

impl SpanUse<'_> {
    fn order(&self) -> (u64, *const CpuStorage, usize, usize) {
        let bytes = &self.range.bytes;
        (self.storage.address, std::ptr::from_ref(self.storage), bytes.start, bytes.end)
    }

    fn contains(&self, span: &ByteSpan<'_>) -> Result<bool> {
        let (own, bytes) = (&self.range.bytes, span.bytes());
        Ok(own.start <= bytes.start && bytes.end <= own.end && std::ptr::eq(self.storage, span.storage()?))
    }

    /// Extends this part to include `next` if the two parts share a byte, and returns whether they do.
    fn joins(&mut self, next: &Self) -> bool {
        let (own, other) = (&mut self.range, &next.range);
        let overlap = std::ptr::eq(self.storage, next.storage) && other.bytes.start < own.bytes.end;
        if overlap {
            own.bytes.end = own.bytes.end.max(other.bytes.end);
            own.write |= other.write;
        }
        overlap
    }
}

impl<'a> Access<'a> {
    /// Locks `reads` for reading and `writes` for writing. Overlapping parts are locked as a single part, for
    /// writing if any of them is in `writes`.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] for a storage of another backend, and [`Error::TooLarge`] for bytes
    /// past the end of a storage. Returns [`Error::Unsupported`] for `writes` to memory that was lent for
    /// reading only.
    pub(crate) fn new(reads: &[&ByteSpan<'a>], writes: &[&ByteSpan<'a>]) -> Result<Self> {
        let mut parts: Few<SpanUse<'a>> = Few::new();
        for (list, write) in [(writes, true), (reads, false)] {
            for span in list {
                let (storage, bytes) = (span.storage()?, span.bytes().clone());
                if bytes.start > bytes.end || bytes.end > storage.len {
                    let what = "end of the bytes that an operation uses";
                    return Err(Error::TooLarge {
                        what,
                        value: bytes.end as i128,
                        most: storage.len as i128,
                    });
                }
                if write {
                    storage.check_writable()?;
                }
                parts.push(SpanUse { storage, range: RangeUse { bytes, write }, turn: RangeTurn::default() });
            }
        }
        parts.sort_unstable_by_key(SpanUse::order);
        parts.dedup_by(|next, last| last.joins(next));
        for parts in parts.chunk_by_mut(|a, b| std::ptr::eq(a.storage, b.storage)) {
            let turn = parts[0].storage.locks.begin(parts.iter().map(|part| &part.range));
            for part in parts {
                part.turn = turn;
            }
        }
        let mut access = Self { parts, lent: SmallVec::new() };
        for part in &access.parts {
            // An owner's lock is taken only once, even if several storages cover its memory.
            if access.lent(part.storage).is_none()
                && let Some(bytes) = part.storage.lock_lent()?
            {
                access.lent.push(bytes);
            }
        }
        Ok(access)
    }

    /// Returns a storage's lent bytes, or `None` if its memory is not lent.
    fn lent(&self, storage: &CpuStorage) -> Option<&LentBytes<'a>> {
        let is_of =
            |bytes: &&LentBytes<'_>| bytes.as_ptr() as u64 == storage.address && bytes.len() == storage.len;
        self.lent.iter().find(is_of)
    }

    /// Returns the bytes of `span`, which must be locked.
    pub(crate) fn read(&self, span: &ByteSpan<'_>) -> Result<Window<'_>> {
        for part in &self.parts {
            if part.contains(span)? {
                let range = &part.range.bytes;
                if let Some(bytes) = self.lent(part.storage) {
                    return Ok(Window { first: range.start, values: &bytes[range.clone()] });
                }
                if part.storage.has_lender() {
                    return Err(not_locked());
                }
                // SAFETY: the part is locked while `self` lives. Writable bytes are handed out only by
                // `windows`, which borrows `self` mutably, so no writable bytes exist now.
                let values = unsafe { part.storage.bytes(range) };
                return Ok(Window { first: range.start, values });
            }
        }
        Err(not_locked())
    }

    /// Returns every locked part, with its storage.
    pub(crate) fn windows(&mut self) -> impl Iterator<Item = (&CpuStorage, LockedBytes<'_>)> {
        let this = &*self;
        this.parts.iter().map(|SpanUse { storage, range, .. }| {
            let first = range.bytes.start;
            if let Some(bytes) = this.lent(storage) {
                return (*storage, LockedBytes::Read(Window { first, values: &bytes[range.bytes.clone()] }));
            }
            if storage.has_lender() {
                // If the lender's bytes have moved, the part has no bytes.
                return (*storage, LockedBytes::Read(Window { first, values: &[] }));
            }
            // SAFETY: the part is locked while `self` lives, for writing if the slice is writable. No two
            // parts of `self` overlap, each part is handed out once, and `self` is borrowed mutably as long
            // as the parts live. Two storages share bytes only if no code writes these bytes, as the
            // storages' constructors require.
            let bytes = unsafe {
                if range.write {
                    LockedBytes::Write(WindowMut { first, values: storage.bytes_mut(&range.bytes) })
                } else {
                    LockedBytes::Read(Window { first, values: storage.bytes(&range.bytes) })
                }
            };
            (*storage, bytes)
        })
    }

    /// Returns all locked bytes, for callers that take them part by part.
    pub(crate) fn parts(&mut self) -> LockedParts<'_> {
        LockedParts(self.windows().collect())
    }
}

impl Drop for Access<'_> {
    fn drop(&mut self) {
        for parts in self.parts.chunk_by(|a, b| std::ptr::eq(a.storage, b.storage)) {
            parts[0].storage.locks.end(parts[0].turn);
        }
    }
}

/// The locked bytes of several storages. Each part can be taken only once.
pub(crate) struct LockedParts<'a>(Few<(&'a CpuStorage, LockedBytes<'a>)>);

pub(crate) enum LockedBytes<'a> {
    Read(Window<'a>),
    Write(WindowMut<'a>),
}

impl LockedBytes<'_> {
    fn contains(&self, bytes: &Range<usize>) -> bool {
        let (first, len) = match self {
            Self::Read(own) => (own.first, own.values.len()),
            Self::Write(own) => (own.first, own.values.len()),
        };
        first <= bytes.start && bytes.end <= first + len
    }
}

impl<'a> LockedParts<'a> {
    fn take(&mut self, span: &ByteSpan<'_>) -> Result<LockedBytes<'a>> {
        let storage = span.storage()?;
        let holds = |(own, bytes): &(&CpuStorage, LockedBytes<'_>)| {
            std::ptr::eq(*own, storage) && bytes.contains(span.bytes())
        };
        let at = self.0.iter().position(holds).ok_or_else(not_locked)?;
        Ok(self.0.swap_remove(at).1)
    }

    /// Removes the locked part that contains a span, and returns it for reading.
    pub(crate) fn read(&mut self, span: &ByteSpan<'_>) -> Result<Window<'a>> {
        match self.take(span)? {
            LockedBytes::Read(bytes) => Ok(bytes),
            LockedBytes::Write(WindowMut { first, values }) => Ok(Window { first, values }),
        }
    }

    /// Removes the locked part that contains a span, and returns it for writing. The part must be locked for
    /// writing.
    pub(crate) fn write(&mut self, span: &ByteSpan<'_>) -> Result<WindowMut<'a>> {
        match self.take(span)? {
            LockedBytes::Write(bytes) => Ok(bytes),
            LockedBytes::Read(_) => Err(not_locked()),
        }
    }
}

/// Returns the error for bytes that a kernel uses without the required lock.
pub(crate) fn not_locked() -> Error {
    let reason = "a kernel uses bytes that it has not locked, or has locked only to read".to_owned();
    Error::Device { backend: NAME, reason }
}

/// Read access to a range of a storage's elements. Indices count from the beginning of the whole storage.
pub(crate) struct Window<'a, T = u8> {
    pub(crate) first: usize,
    pub(crate) values: &'a [T],
}

/// Write access to a range of a storage's elements. Indices count from the beginning of the whole storage.
pub(crate) struct WindowMut<'a, T = u8> {
    pub(crate) first: usize,
    pub(crate) values: &'a mut [T],
}

impl<T> Clone for Window<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Window<'_, T> {}

impl<'a> Window<'a> {
    /// Reinterprets the bytes as elements of type `T`. The window must begin at a multiple of the size of `T`,
    /// and an incomplete element at the end is dropped.
    pub(crate) fn elements<T: Element>(self) -> Result<Window<'a, T>> {
        Ok(Window { first: self.first / size_of::<T>(), values: elements(self.values)? })
    }
}

impl<'a> WindowMut<'a> {
    /// Reinterprets the bytes as elements of type `T`. The window must begin at a multiple of the size of `T`,
    /// and an incomplete element at the end is dropped.
    pub(crate) fn elements<T: Element>(self) -> Result<WindowMut<'a, T>> {
        Ok(WindowMut { first: self.first / size_of::<T>(), values: elements_mut(self.values)? })
    }
}

impl<'a, T> Window<'a, T> {
    /// Returns the elements in a range of indices, which count from the beginning of the storage.
    pub(crate) fn get(self, range: Range<usize>) -> &'a [T] {
        &self.values[range.start - self.first..range.end - self.first]
    }
}

impl<T> Index<Range<usize>> for Window<'_, T> {
    type Output = [T];

    fn index(&self, range: Range<usize>) -> &[T] {
        self.get(range)
    }
}

impl<T> Index<Range<usize>> for WindowMut<'_, T> {
    type Output = [T];

    fn index(&self, range: Range<usize>) -> &[T] {
        &self.values[range.start - self.first..range.end - self.first]
    }
}

impl<T> IndexMut<Range<usize>> for WindowMut<'_, T> {
    fn index_mut(&mut self, range: Range<usize>) -> &mut [T] {
        &mut self.values[range.start - self.first..range.end - self.first]
    }
}

#[cfg(test)]
mod tests {
    use kvcore::{DType, MemoryKind};

    use super::*;

    fn storage(bytes: usize) -> Arc<dyn Storage> {
        Arc::new(CpuStorage::allocate(MemoryKind::System, bytes).unwrap())
    }

    #[test]
    fn parts_that_overlap_are_one_and_are_taken_once() {
        let storage = storage(16);
        let (a, b) = (ByteSpan::new(&storage, 2..6), ByteSpan::new(&storage, 4..8));
        let mut access = Access::new(&[&a], &[&b]).unwrap();
        assert_eq!(access.read(&ByteSpan::new(&storage, 2..8)).unwrap().values.len(), 6);
        let mut parts = access.parts();
        parts.write(&b).unwrap()[4..6].fill(1);
        assert!(parts.read(&a).is_err(), "taken already");
        drop(parts);
        assert_eq!(access.read(&a).unwrap().get(2..6), [0, 0, 1, 1]);
    }

    #[test]
    fn unlocked_and_missing_bytes_are_refused() {
        let (storage, other) = (storage(16), storage(16));
        let part = ByteSpan::new(&storage, 0..4);
        let mut access = Access::new(&[&part], &[]).unwrap();
        for span in
            [ByteSpan::new(&storage, 0..5), ByteSpan::new(&storage, 8..9), ByteSpan::new(&other, 0..4)]
        {
            assert!(matches!(access.read(&span), Err(Error::Device { .. })));
        }
        assert!(access.parts().write(&part).is_err(), "locked to read");
        let outside = Access::new(&[&ByteSpan::new(&storage, 8..17)], &[]).map(drop);
        assert!(matches!(outside, Err(Error::TooLarge { value: 17, most: 16, .. })));
    }

    #[test]
    fn adjacent_parts_are_separate() {
        let storage = storage(16);
        let (left, right) = (ByteSpan::new(&storage, 0..8), ByteSpan::new(&storage, 8..16));
        let mut access = Access::new(&[&left], &[&right]).unwrap();
        let mut parts = access.parts();
        let (from, mut to) = (parts.read(&left).unwrap(), parts.write(&right).unwrap());
        to[8..16].copy_from_slice(&from[0..8]);
    }

    #[test]
    fn empty_views_lock_nothing() {
        let storage = storage(16);
        let view = TensorView::new(Arc::clone(&storage), DType::U8, &[16]).unwrap();
        let _all = Access::new(&[], &[&ByteSpan::of(&view).unwrap()]).unwrap();
        let none = view.slice(0, 4, 4).unwrap();
        // This thread already holds all locks, so a lock that had to wait would never return.
        let mut access = Access::new(&[], &[&ByteSpan::of(&none).unwrap()]).unwrap();
        assert!(access.parts().write(&ByteSpan::of(&none).unwrap()).unwrap().values.is_empty());
    }
}
