//! Bytes that several threads use at the same time, each its own part.

use std::marker::PhantomData;

/// Bytes to write. Whoever takes a pointer out of it sees to it that no two threads touch the same bytes.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    start: *mut u8,
    len: usize,
    life: PhantomData<&'a mut [u8]>,
}

/// Bytes to read; they may be part of a [`Target`] that nobody writes there.
#[derive(Clone, Copy)]
pub(crate) struct Origin<'a> {
    start: *const u8,
    len: usize,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: the bytes belong to the borrower; which thread touches which of them is the duty of who dereferences.
unsafe impl Send for Target<'_> {}
// SAFETY: as above.
unsafe impl Sync for Target<'_> {}
// SAFETY: as above.
unsafe impl Send for Origin<'_> {}
// SAFETY: as above.
unsafe impl Sync for Origin<'_> {}

impl<'a> Target<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), len: bytes.len(), life: PhantomData }
    }

    /// The same bytes, to read.
    pub(crate) fn as_origin(self) -> Origin<'a> {
        Origin { start: self.start, len: self.len, life: PhantomData }
    }

    /// Where `len` bytes begin.
    ///
    /// # Panics
    /// If they are not all inside.
    #[inline]
    pub(crate) fn at(self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len && len <= self.len - offset, "bytes {offset} + {len} of {}", self.len);
        self.start.wrapping_add(offset)
    }

    /// Whether a place is aligned to a cache line.
    pub(crate) fn is_line(self, offset: usize) -> bool {
        (self.start as usize + offset).is_multiple_of(64)
    }
}

impl<'a> Origin<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len(), life: PhantomData }
    }

    /// Where `len` bytes begin.
    ///
    /// # Panics
    /// If they are not all inside.
    #[inline]
    pub(crate) fn at(self, offset: usize, len: usize) -> *const u8 {
        assert!(offset <= self.len && len <= self.len - offset, "bytes {offset} + {len} of {}", self.len);
        self.start.wrapping_add(offset)
    }

    /// `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not all inside.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        Self { start: self.at(offset, len), len, life: PhantomData }
    }
}
