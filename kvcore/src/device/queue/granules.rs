//! The granules of a reservation, each of which has its own physical memory or none.

use std::ops::Range;

use parking_lot::Mutex;

use crate::base::{Error, Result};
use crate::device::check_granules;

// Decision: docs/decisions/backend-cuda.md#granules-grow-with-the-reservation
/// The approximate maximum number of granules per reservation, as long as granules are smaller than
/// [`LARGEST`]. Larger reservations use larger granules, because each granule needs its own driver call.
const FINE: usize = 2048;

/// Maximum size of a granule, in bytes, unless the device's smallest granule is larger.
const LARGEST: usize = 64 << 20;

/// Returns two sizes in bytes: the granule size, which is a power of two, and the size of a reservation of at
/// least `bytes` bytes. `least` is the size of the device's smallest granule.
///
/// # Errors
/// Returns [`Error::Overflow`] if the reservation is larger than the address space.
pub fn granules_for(bytes: usize, least: usize) -> Result<(usize, usize)> {
    let granule = (bytes / FINE).next_power_of_two().min(LARGEST).max(least.next_power_of_two());
    let len = bytes.checked_next_multiple_of(granule);
    len.map(|len| (granule, len)).ok_or(Error::Overflow { what: "bytes of a reservation" })
}

/// The granules of a reservation. A mapped granule has the device's handle to its physical memory.
#[derive(Debug)]
pub struct Granules<H> {
    granule: usize,
    handles: Mutex<Vec<Option<H>>>,
}

impl<H> Granules<H> {
    /// Returns the granules of a reservation of `len` bytes, none of them mapped.
    pub fn new(granule: usize, len: usize) -> Self {
        Self { granule, handles: Mutex::new((0..len / granule).map(|_| None).collect()) }
    }

    /// Returns the size of a granule in bytes.
    pub fn granule(&self) -> usize {
        self.granule
    }

    /// Returns the total size of all granules, in bytes.
    pub fn reserved_bytes(&self) -> usize {
        self.handles.lock().len() * self.granule
    }

    /// Returns the total size of the mapped granules, in bytes.
    pub fn mapped_bytes(&self) -> usize {
        self.handles.lock().iter().flatten().count() * self.granule
    }

    /// Checks that a range consists of whole granules of the reservation.
    ///
    /// # Errors
    /// Returns the errors of [`check_granules`].
    pub fn check(&self, range: &Range<usize>) -> Result<()> {
        check_granules(range, self.granule, self.reserved_bytes())
    }

    /// Maps the granules of a checked range that have no memory. `place` and `release` receive the granule's
    /// offset in bytes; `release` undoes `place`.
    ///
    /// # Errors
    /// Returns the error of `place`. In that case no granule is mapped by this call.
    pub fn map(
        &self,
        range: Range<usize>,
        mut place: impl FnMut(usize) -> Result<H>,
        mut release: impl FnMut(usize, H),
    ) -> Result<()> {
        let mut handles = self.handles.lock();
        let mut placed = Vec::new();
        for i in (range.start / self.granule..range.end / self.granule).filter(|&i| handles[i].is_none()) {
            match place(i * self.granule) {
                Ok(handle) => placed.push((i, handle)),
                Err(error) => {
                    for (i, handle) in placed {
                        release(i * self.granule, handle);
                    }
                    return Err(error);
                }
            }
        }
        for (i, handle) in placed {
            handles[i] = Some(handle);
        }
        Ok(())
    }

    /// Unmaps the granules of a checked range that have memory. `release` receives the granule's offset in
    /// bytes.
    pub fn unmap(&self, range: Range<usize>, mut release: impl FnMut(usize, H)) {
        let mut handles = self.handles.lock();
        for i in range.start / self.granule..range.end / self.granule {
            if let Some(handle) = handles[i].take() {
                release(i * self.granule, handle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_granule_leaves_the_range_as_it_was() {
        let granules = Granules::new(4, 16);
        granules.map(4..8, Ok, |_, _| {}).unwrap();
        let mut released = Vec::new();
        let refused = |at| if at == 12 { Err(Error::Zero { what: "memory" }) } else { Ok(at) };
        assert!(granules.map(0..16, refused, |at, _| released.push(at)).is_err());
        assert_eq!((released, granules.mapped_bytes()), (vec![0, 8], 4));
        assert!(granules.check(&(2..8)).is_err() && granules.check(&(8..20)).is_err());
        let mut released = Vec::new();
        granules.unmap(0..16, |at, handle| released.push((at, handle)));
        assert_eq!((released, granules.mapped_bytes()), (vec![(4, 4)], 0));
    }

    #[test]
    fn granules_grow_with_the_reservation() {
        assert_eq!(granules_for(1, 2 << 20).unwrap(), (2 << 20, 2 << 20));
        assert_eq!(granules_for(80 << 30, 2 << 20).unwrap().0, 64 << 20);
        assert!(granules_for(usize::MAX, 2 << 20).is_err());
    }
}
