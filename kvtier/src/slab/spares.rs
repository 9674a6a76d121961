//! Memory of records that have been written or used, for the next ones. The kernel takes longer to provide fresh
//! memory than a copy into it takes.

use parking_lot::Mutex;

/// Smaller buffers are left to the allocator.
const SMALLEST: usize = 64 << 10;

/// Buffers that nobody uses, up to a number of bytes.
#[derive(Default)]
pub(super) struct Spares(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Spares {
    /// Returns a buffer of `len` bytes with undefined contents.
    pub(super) fn take(&self, len: usize) -> Vec<u8> {
        let mut kept = self.0.lock();
        // A much larger buffer would be wasted.
        let fits = |spare: &Vec<u8>| (len..=len.saturating_mul(2)).contains(&spare.len());
        let found = kept.buffers.iter().rposition(fits).filter(|_| len >= SMALLEST);
        let Some(at) = found else {
            drop(kept);
            return vec![0; len];
        };
        let mut buffer = kept.buffers.swap_remove(at);
        kept.bytes -= buffer.capacity();
        drop(kept);
        buffer.truncate(len);
        buffer
    }

    /// Keeps buffers if there are at most `most` bytes together. The oldest ones leave first.
    pub(super) fn give(&self, buffers: impl IntoIterator<Item = Vec<u8>>, most: usize) {
        let mut kept = self.0.lock();
        for buffer in buffers.into_iter().filter(|buffer| (SMALLEST..=most).contains(&buffer.capacity())) {
            kept.bytes += buffer.capacity();
            kept.buffers.push(buffer);
        }
        let mut leave = 0;
        while kept.bytes > most {
            kept.bytes -= kept.buffers[leave].capacity();
            leave += 1;
        }
        let gone: Vec<_> = kept.buffers.drain(..leave).collect();
        drop(kept);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_up_to_a_limit() {
        let spares = Spares::default();
        let (large, small) = (vec![7_u8; 4 * SMALLEST], vec![7_u8; SMALLEST / 2]);
        let address = large.as_ptr();
        spares.give([large, small], 8 * SMALLEST);
        assert_eq!(spares.take(SMALLEST), vec![0; SMALLEST], "the other one is too large");
        assert_eq!(spares.take(SMALLEST / 2), vec![0; SMALLEST / 2], "this one was not kept");
        let again = spares.take(3 * SMALLEST);
        assert_eq!((again.as_ptr(), again.len()), (address, 3 * SMALLEST));
        let other = spares.take(3 * SMALLEST);
        assert_ne!(other.as_ptr(), address, "it is lent");
        spares.give([again], SMALLEST);
        let kept = spares.0.lock();
        assert_eq!((kept.bytes, kept.buffers.len()), (0, 0), "it is larger than the limit");
        drop(kept);
        for byte in 0..5 {
            spares.give([vec![byte; 2 * SMALLEST]], 4 * SMALLEST);
        }
        let kept = spares.0.lock();
        let first: Vec<u8> = kept.buffers.iter().map(|buffer| buffer[0]).collect();
        assert_eq!((kept.bytes, first), (4 * SMALLEST, vec![3, 4]), "the oldest ones have left");
    }
}
