//! Reserved memory: addresses that stay while the physical memory behind them goes and comes back.

use std::ops::Range;

use super::Storage;
use crate::base::{Error, Result};

/// A storage whose addresses stay for its whole life, and whose physical memory does not: what a pool
/// sleeps in.
///
/// # Contract
/// - It is wholly mapped and zero when it is made. Its length is a multiple of the granularity.
/// - [`unmap`](Self::unmap) gives the physical memory of a range back to the device or the system. The
///   contents are gone; everything outside the range, and every address, stays as it is.
/// - [`map`](Self::map) brings memory back at the same addresses; what was unmapped reads as zeros.
/// - Both go by *granules*: ranges in bytes that begin and end at multiples of
///   [`granularity`](Self::granularity), or they are refused. [`whole_granules`] rounds a range inward.
/// - Unmapping what is unmapped and mapping what is mapped does nothing, also for parts of a range.
/// - Both act at once and wait for nothing: the caller first waits for the enqueued work that touches the
///   range. What reads an unmapped range afterwards gets any bytes, and what writes there is lost; on a
///   device it may end the context, in host memory it never faults.
///
/// [`Backend::reserve`](super::Backend::reserve) makes one.
pub trait ReservedStorage: Storage {
    /// Bytes in which physical memory goes and comes: a power of two.
    fn granularity(&self) -> usize;

    /// Puts physical memory, zeroed, behind the granules of `range` that have none.
    ///
    /// # Errors
    /// [`Error::Misaligned`] and [`Error::OutOfRange`] for a wrong range, [`Error::Allocation`] when memory
    /// is refused. Nothing is mapped then.
    fn map(&self, range: Range<usize>) -> Result<()>;

    /// Releases the physical memory of `range` and what it holds.
    ///
    /// # Errors
    /// [`Error::Misaligned`] and [`Error::OutOfRange`] for a wrong range, [`Error::Allocation`] when the
    /// system refuses. Nothing is unmapped then.
    fn unmap(&self, range: Range<usize>) -> Result<()>;

    /// Bytes that are mapped.
    fn mapped_bytes(&self) -> usize;
}

/// Checks a range of [`ReservedStorage::map`] and [`unmap`](ReservedStorage::unmap): what every backend
/// calls first.
///
/// # Errors
/// [`Error::OutOfRange`] for a range that ends before it begins or past the storage, [`Error::Misaligned`]
/// for ends that are no multiples of the granularity.
pub fn check_granules(range: &Range<usize>, granularity: usize, len: usize) -> Result<()> {
    if range.end > len {
        return Err(Error::range("end of a reserved range", range.end, len + 1));
    }
    if range.start > range.end {
        return Err(Error::range("start of a reserved range", range.start, range.end + 1));
    }
    match [range.start, range.end].into_iter().find(|at| !at.is_multiple_of(granularity)) {
        Some(at) => {
            Err(Error::Misaligned { what: "a reserved range", address: at as u64, align: granularity })
        }
        None => Ok(()),
    }
}

/// The granules that lie wholly inside `range`; an empty range at its end if there are none.
///
/// ```
/// use kvcore::whole_granules;
/// assert_eq!(whole_granules(4095..12_289, 4096), 4096..12_288);
/// assert!(whole_granules(1..8191, 4096).is_empty());
/// ```
pub fn whole_granules(range: Range<usize>, granularity: usize) -> Range<usize> {
    let end = range.end - range.end % granularity;
    let start = range.start.checked_next_multiple_of(granularity).unwrap_or(end);
    start.min(end)..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_inside_in_order_and_aligned() {
        for good in [0..0, 0..8, 8..16, 16..16] {
            assert_eq!(check_granules(&good, 8, 16), Ok(()));
        }
        let reversed = Range { start: 16, end: 8 };
        for outside in [0..24, 24..24, reversed, 0..usize::MAX] {
            assert!(matches!(check_granules(&outside, 8, 16), Err(Error::OutOfRange { .. })), "{outside:?}");
        }
        for odd in [1..8, 0..7, 4..12] {
            assert!(matches!(check_granules(&odd, 8, 16), Err(Error::Misaligned { align: 8, .. })));
        }
    }

    #[test]
    fn rounding_inward_never_leaves_the_range() {
        for start in 0..20 {
            for end in start..20 {
                let inside = whole_granules(start..end, 8);
                let bytes: Vec<usize> = (start..end).filter(|at| at - at % 8 >= start).collect();
                let whole = bytes.iter().filter(|&&at| at - at % 8 + 8 <= end).count();
                assert_eq!(inside.len(), whole, "{start}..{end}");
                assert!(inside.is_empty() || (inside.start >= start && inside.end <= end));
            }
        }
        assert!(whole_granules(usize::MAX - 3..usize::MAX, 8).is_empty());
    }
}
