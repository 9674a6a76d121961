//! The KV of all parts of a prompt as one run, for kernels that do not support segments.

use kvcore::{BlockId, Segment, SlotMapping};

use crate::error::Result;

/// The slots and positions of the system prompt, the chunks and any further parts, in logical order.
///
/// Each position is where the token is *used*, but the keys are rotated to the positions where they were
/// stored. A kernel that uses one block table for all parts therefore needs parts without an offset (as with
/// the overlapped strategy in with-system mode, or the absolute strategy), or the run of a
/// [`RotatedCopy`](crate::RotatedCopy).
///
/// ```
/// use kvchunk::MergedRun;
/// use kvcore::{BlockId, Segment};
/// let system = Segment::new([BlockId(0)].into(), 3, 0, 0);
/// let chunk = Segment::new([BlockId(9), BlockId(5)].into(), 6, 3, 0).at_offset(3);
/// let merged = MergedRun::new(&[system, chunk], 4)?;
/// assert_eq!(merged.slot_mapping.slots()[..], [0, 1, 2, 36, 37, 38, 39, 20, 21]);
/// assert_eq!(merged.positions, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
/// assert_eq!((merged.block_ids.len(), merged.total_tokens), (3, 9));
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(alias = "MergedKVCache")]
pub struct MergedRun {
    /// The slot of each token.
    pub slot_mapping: SlotMapping,
    /// The position at which each token is used.
    pub positions: Vec<i64>,
    /// The blocks of the parts, one part after another. They need not be contiguous.
    pub block_ids: Vec<BlockId>,
    /// The total number of tokens in all parts.
    pub total_tokens: usize,
}

impl MergedRun {
    /// Merges `parts` in the given order, with `block_size` tokens per block.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if a segment has more tokens than its blocks hold.
    pub fn new(parts: &[Segment], block_size: usize) -> Result<Self> {
        let slots = |part: &Segment| SlotMapping::in_blocks(&part.blocks, block_size, 0..part.len);
        let slots = parts.iter().map(slots).collect::<Result<Vec<_>, _>>()?;
        let positions = parts.iter().flat_map(|part| {
            let start = part.stored_start + part.position_offset;
            start..start + part.len as i64
        });
        Ok(Self {
            slot_mapping: SlotMapping::concat(&slots),
            positions: positions.collect(),
            block_ids: parts.iter().flat_map(|part| part.blocks.iter().copied()).collect(),
            total_tokens: parts.iter().map(|part| part.len).sum(),
        })
    }
}
