//! Reserved memory: fixed addresses whose physical memory can be released and mapped again.

use std::ops::Range;

use super::Storage;
use crate::base::{Error, Result};

/// A storage with fixed addresses whose physical memory can be released and mapped again. Pools whose blocks
/// can sleep use such a storage.
///
/// # Contract
/// - A new storage is fully mapped and zeroed. Its length is a multiple of the granularity.
/// - [`unmap`](Self::unmap) returns the physical memory of a range to the device or the system. The contents
///   of the range are lost. Everything outside the range and all addresses stay unchanged.
/// - [`map`](Self::map) restores memory at the same addresses. Memory that was unmapped reads as zeros.
/// - Both methods work in *granules*: they reject a byte range unless it begins and ends at multiples of
///   [`granularity`](Self::granularity). [`whole_granules`] rounds a range inward.
/// - Unmapping memory that is not mapped, or mapping memory that is already mapped, has no effect. The same
///   applies to parts of a range.
/// - Both methods take effect immediately, without waiting: the caller MUST first wait for the enqueued work
///   that touches the range. Reads of an unmapped range return arbitrary bytes, and writes to it are lost. On
///   a device such an access may destroy the context; in host memory it never causes a fault.
///
/// [`Backend::reserve`](super::Backend::reserve) creates a reserved storage.
pub trait ReservedStorage: Storage {
    /// Returns the granule size in bytes: a power of two. Physical memory is mapped and released in
    /// granules.
    fn granularity(&self) -> usize;

    /// Maps zeroed physical memory for all granules of `range` that have no memory.
    ///
    /// # Errors
    /// Returns [`Error::Misaligned`] or [`Error::TooLarge`] for an invalid range, and [`Error::Allocation`]
    /// if there is not enough memory. Nothing is mapped in these cases.
    fn map(&self, range: Range<usize>) -> Result<()>;

    /// Releases the physical memory of `range`. The contents of the range are lost.
    ///
    /// # Errors
    /// Returns [`Error::Misaligned`] or [`Error::TooLarge`] for an invalid range, and [`Error::Allocation`]
    /// if the system refuses. Nothing is unmapped in these cases.
    fn unmap(&self, range: Range<usize>) -> Result<()>;

    /// Returns the number of mapped bytes.
    fn mapped_bytes(&self) -> usize;

    /// Returns the size of the physical memory behind the storage, in bytes. On a device that can release a
    /// storage only as a whole, this can exceed the number of mapped bytes.
    fn resident_bytes(&self) -> usize {
        self.mapped_bytes()
    }
}

// Decision: docs/decisions/device.md#reserved-ranges-are-whole-granules
/// Checks the range given to [`ReservedStorage::map`] or [`unmap`](ReservedStorage::unmap). Every backend
/// calls this first.
///
/// # Errors
/// Returns [`Error::TooLarge`] if the range ends before it begins or past the storage, and
/// [`Error::Misaligned`] if its start or end is not a multiple of the granularity.
pub fn check_granules(range: &Range<usize>, granularity: usize, len: usize) -> Result<()> {
    if range.end > len {
        return Err(Error::too_large("end of a reserved range", range.end, len));
    }
    if range.start > range.end {
        return Err(Error::too_large("start of a reserved range", range.start, range.end));
    }
    match [range.start, range.end].into_iter().find(|at| !at.is_multiple_of(granularity)) {
        Some(at) => {
            Err(Error::Misaligned { what: "a reserved range", address: at as u64, align: granularity })
        }
        None => Ok(()),
    }
}

/// Returns the part of `range` that consists of whole granules, or an empty range if there are none.
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
            assert!(matches!(check_granules(&outside, 8, 16), Err(Error::TooLarge { .. })), "{outside:?}");
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
