//! The bytes of a record, in memory that a disk can read and write without a copy.

use std::fmt;
use std::ops::{Deref, DerefMut};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::io::{PAGE, Piece};

/// A buffer of a record: K, V, or scales.
///
/// Memory of a [slab](crate::Slab::buffers) reaches the disk without a copy. Vectors are copied to such memory first.
pub struct RecordBuffer {
    memory: Memory,
    /// The number of bytes in use, from the start.
    len: usize,
    /// The digest of the bytes, if it is known.
    digest: Option<u64>,
}

enum Memory {
    Bytes(Vec<u8>),
    Piece(Piece),
}

impl RecordBuffer {
    /// Returns buffers of zeros with these lengths, in memory of the allocator.
    pub fn zeroed(lens: &[usize]) -> Vec<Self> {
        lens.iter().map(|&len| vec![0; len].into()).collect()
    }

    /// Fills the buffer in runs of `len` bytes: `fill` gets the number of a run and its bytes. The last run may be shorter.
    /// Computes the digest on the way, while the processor's cache contains the run.
    ///
    /// # Errors
    /// Returns the first error of `fill`.
    pub fn fill_runs<E>(
        &mut self,
        len: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut digest = Xxh3::new();
        for (number, run) in self.chunks_mut(len.max(1)).enumerate() {
            fill(number, run)?;
            digest.update(run);
        }
        self.digest = Some(digest.digest());
        Ok(())
    }

    /// Returns the digest of the bytes.
    pub(crate) fn digest(&self) -> u64 {
        self.digest.unwrap_or_else(|| xxh3_64(self))
    }

    /// Returns the digest of the bytes if nobody has to compute it.
    pub(crate) fn known_digest(&self) -> Option<u64> {
        self.digest
    }

    /// Returns whether buffers of these lengths can lie one behind the other, each in pages of its own.
    pub(crate) fn can_divide(lens: &[usize]) -> bool {
        lens.split_last().is_some_and(|(_, others)| others.iter().all(|len| len.is_multiple_of(PAGE)))
    }

    /// Divides a piece into buffers of these lengths. Returns the piece as `Err` if it is too small, or if a buffer other
    /// than the last one does not fill its pages.
    pub(crate) fn divide(piece: Piece, lens: &[usize]) -> Result<Vec<Self>, Piece> {
        let pages = lens.iter().try_fold(0_usize, |sum, len| sum.checked_add(len.div_ceil(PAGE)));
        let fits = Self::can_divide(lens) && pages.is_some_and(|pages| pages <= piece.pages());
        let Some((last, others)) = lens.split_last().filter(|_| fits) else { return Err(piece) };
        let mut buffers = Vec::with_capacity(lens.len());
        let mut rest = piece;
        for &len in others {
            let (piece, others) = rest.split(len / PAGE);
            buffers.push(Self { memory: Memory::Piece(piece), len, digest: None });
            rest = others;
        }
        buffers.push(Self { memory: Memory::Piece(rest), len: *last, digest: None });
        Ok(buffers)
    }

    /// Returns whether the bytes fill whole pages that a disk can use.
    pub(crate) fn fills_pages(&self) -> bool {
        matches!(self.memory, Memory::Piece(_)) && self.len.is_multiple_of(PAGE)
    }

    /// Returns the number of bytes of the memory, which may be larger than the buffer.
    pub(crate) fn memory_bytes(&self) -> usize {
        match &self.memory {
            Memory::Bytes(bytes) => bytes.capacity(),
            Memory::Piece(piece) => piece.pages() * PAGE,
        }
    }

    /// Returns the memory if a disk can use it.
    pub(crate) fn into_piece(self) -> Option<Piece> {
        match self.memory {
            Memory::Piece(piece) => Some(piece),
            Memory::Bytes(_) => None,
        }
    }
}

impl Deref for RecordBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let bytes = match &self.memory {
            Memory::Bytes(bytes) => bytes,
            Memory::Piece(piece) => piece.bytes(),
        };
        &bytes[..self.len]
    }
}

impl DerefMut for RecordBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.digest = None;
        let bytes = match &mut self.memory {
            Memory::Bytes(bytes) => bytes,
            Memory::Piece(piece) => piece.bytes_mut(),
        };
        &mut bytes[..self.len]
    }
}

impl AsRef<[u8]> for RecordBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for RecordBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self { len: bytes.len(), memory: Memory::Bytes(bytes), digest: None }
    }
}

impl Clone for RecordBuffer {
    fn clone(&self) -> Self {
        self.to_vec().into()
    }
}

impl<T: AsRef<[u8]> + ?Sized> PartialEq<T> for RecordBuffer {
    fn eq(&self, other: &T) -> bool {
        **self == *other.as_ref()
    }
}

impl Eq for RecordBuffer {}

impl fmt::Debug for RecordBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_piece_becomes_buffers_where_pages_end() {
        let lens = [PAGE, 2 * PAGE, 100];
        let mut buffers = RecordBuffer::divide(Piece::allocate(5), &lens).unwrap();
        for (buffer, byte) in buffers.iter_mut().zip(1..) {
            buffer.fill(byte);
        }
        for ((buffer, len), byte) in buffers.iter().zip(lens).zip(1..) {
            assert_eq!((buffer, buffer.fills_pages()), (&vec![byte; len].into(), len != 100));
        }
        let pieces = buffers.into_iter().map(|buffer| buffer.into_piece().unwrap()).collect();
        let joined = Piece::join_all(pieces);
        assert_eq!(joined.iter().map(Piece::pages).collect::<Vec<_>>(), [5]);
        for lens in [&[100, PAGE][..], &[PAGE, 5 * PAGE], &[PAGE, usize::MAX], &[]] {
            assert!(RecordBuffer::divide(Piece::allocate(5), lens).is_err(), "{lens:?}");
        }
    }

    #[test]
    fn a_digest_is_that_of_the_bytes() {
        let mut buffer = RecordBuffer::from(vec![0; 1000]);
        assert_eq!(buffer.known_digest(), None);
        let filled = buffer.fill_runs(300, |number, run| {
            run.fill(number as u8 + 1);
            Ok::<(), ()>(())
        });
        assert_eq!((filled, buffer[899], buffer[900]), (Ok(()), 3, 4));
        assert_eq!(buffer.known_digest(), Some(xxh3_64(&buffer)));
        buffer[5] = 9;
        assert_eq!((buffer.known_digest(), buffer.digest()), (None, xxh3_64(&buffer)));
        assert_eq!(buffer.fill_runs(300, |number, _| if number < 2 { Ok(()) } else { Err(number) }), Err(2));
        assert_eq!(buffer.known_digest(), None, "it is only known of all runs");
    }

    #[test]
    fn a_copy_has_memory_of_its_own() {
        let mut buffer = RecordBuffer::divide(Piece::allocate(1), &[PAGE]).unwrap().remove(0);
        buffer.fill(3);
        let copy = buffer.clone();
        buffer.fill(4);
        assert!(copy == vec![3; PAGE] && buffer != copy && !copy.fills_pages());
        assert!(copy.into_piece().is_none());
    }
}
