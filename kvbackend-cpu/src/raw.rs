//! Bytes that several threads use at the same time. Each thread uses its own part.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::memory::{Window, WindowMut};

/// A range of bytes that threads write to.
///
/// While a pointer from [`at`](Self::at) is in use, no other thread may access the same bytes.
#[derive(Clone, Copy)]
pub(crate) struct Destination<'a> {
    start: *mut u8,
    /// The offset of the first byte, which `start` points to.
    first: usize,
    len: usize,
    life: PhantomData<&'a mut [u8]>,
}

/// A range of bytes that threads read from. The bytes may belong to a [`Destination`] if no code writes to
/// them at the same time.
#[derive(Clone, Copy)]
pub(crate) struct Origin<'a> {
    start: *const u8,
    /// The offset of the first byte, which `start` points to.
    first: usize,
    len: usize,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a `Destination` holds the exclusive borrow `'a` of its bytes. It does not access the bytes itself:
// code that dereferences a pointer from `at` guarantees that no two threads access the same byte.
unsafe impl Send for Destination<'_> {}
// SAFETY: `&Destination` only hands out pointers, through `at`; code that dereferences them excludes races,
// as for `Send`.
unsafe impl Sync for Destination<'_> {}
// SAFETY: an `Origin` holds a borrow `'a` of bytes that are only read. It does not access the bytes itself:
// code that dereferences a pointer from `at` guarantees that no thread writes the same byte.
unsafe impl Send for Origin<'_> {}
// SAFETY: `&Origin` only hands out pointers, through `at`; code that dereferences them excludes races, as for
// `Send`.
unsafe impl Sync for Origin<'_> {}

impl<'a> Destination<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), first: 0, len: bytes.len(), life: PhantomData }
    }

    /// Wraps uninitialised memory, to be filled by threads.
    pub(crate) fn to_fill<T>(elements: &'a mut [MaybeUninit<T>]) -> Self {
        let (start, len) = (elements.as_mut_ptr().cast(), size_of_val(elements));
        Self { start, first: 0, len, life: PhantomData }
    }

    /// Wraps part of a storage. The bytes keep their offsets in the storage.
    pub(crate) fn of(WindowMut { first, values }: WindowMut<'a>) -> Self {
        Self { first, ..Self::new(values) }
    }

    /// Returns the bytes as an [`Origin`] for reading.
    pub(crate) fn as_origin(self) -> Origin<'a> {
        Origin { start: self.start, first: self.first, len: self.len, life: PhantomData }
    }

    /// Returns a pointer to the `len` bytes that begin at `offset`.
    ///
    /// # Panics
    /// Panics if `offset..offset + len` is out of bounds.
    #[inline]
    pub(crate) fn at(self, offset: usize, len: usize) -> *mut u8 {
        self.start.wrapping_add(place((self.first, self.len), offset, len))
    }

    /// Returns whether the byte at `offset` begins a cache line.
    pub(crate) fn is_line(self, offset: usize) -> bool {
        (self.start as usize + (offset - self.first)).is_multiple_of(64)
    }
}

/// Returns the position of `len` bytes at `offset` within a range of `own.1` bytes that begins at offset
/// `own.0`.
///
/// # Panics
/// Panics if the range is out of bounds.
#[inline]
fn place(own: (usize, usize), offset: usize, len: usize) -> usize {
    let at = offset.wrapping_sub(own.0);
    assert!(at <= own.1 && len <= own.1 - at, "bytes {offset} + {len} of {} + {}", own.0, own.1);
    at
}

impl<'a> Origin<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), first: 0, len: bytes.len(), life: PhantomData }
    }

    /// Wraps part of a storage. The bytes keep their offsets in the storage.
    pub(crate) fn of(part: Window<'a>) -> Self {
        Self { first: part.first, ..Self::new(part.values) }
    }

    /// Returns whether a range of offsets is inside the bytes.
    pub(crate) fn holds(self, range: &Range<usize>) -> bool {
        self.first <= range.start && range.end <= self.first + self.len
    }

    /// Returns a pointer to the `len` bytes that begin at `offset`.
    ///
    /// # Panics
    /// Panics if `offset..offset + len` is out of bounds.
    #[inline]
    pub(crate) fn at(self, offset: usize, len: usize) -> *const u8 {
        self.start.wrapping_add(place((self.first, self.len), offset, len))
    }

    /// Returns the `len` bytes that begin at `offset`. In the result, their offsets begin at 0.
    ///
    /// # Panics
    /// Panics if `offset..offset + len` is out of bounds.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        Self { start: self.at(offset, len), first: 0, len, life: PhantomData }
    }
}
