//! Selections for sparse attention, which limit the tokens that each row may attend to.

use std::sync::Arc;

use super::Segment;
use crate::base::{Error, Result, same};

/// The unit that the indices of a [`Selection`] count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SelectionUnit {
    /// Single tokens.
    Tokens,
    /// Blocks. The last block of a segment may be partial.
    Blocks,
}

// Decision: docs/decisions/device.md#a-selection-indexes-the-entrys-own-tokens
/// The tokens or blocks that each row of an entry may attend to, in compressed sparse row (CSR) format.
///
/// Indices count the tokens (or blocks) of the entry's segments from 0, in segment order. A row attends to a
/// token only if the token is selected *and* causality and the window allow it.
///
/// ```
/// use kvcore::{Selection, SelectionUnit};
/// let unit = SelectionUnit::Blocks;
/// let s = Selection { unit, offsets: [0, 2, 2].into(), indices: [0, 7].into() };
/// assert_eq!((s.row(0), s.row(1)), (&[0, 7][..], &[][..])); // the second row sees nothing
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Unit of the indices.
    pub unit: SelectionUnit,
    /// Row `i` of the entry selects `indices[offsets[i]..offsets[i + 1]]`. Must have one more element than
    /// there are rows.
    pub offsets: Arc<[u32]>,
    /// Selected units, which must strictly increase within each row.
    pub indices: Arc<[u32]>,
}

impl Selection {
    /// Returns the indices that row `row` of the entry selects, or an empty slice for a row without offsets.
    pub fn row(&self, row: usize) -> &[u32] {
        match self.offsets.get(row..).unwrap_or_default() {
            &[start, end, ..] => self.indices.get(start as usize..end as usize).unwrap_or_default(),
            _ => &[],
        }
    }

    /// Returns the number of tokens in one unit.
    pub fn tokens_per_unit(&self, block_size: usize) -> usize {
        match self.unit {
            SelectionUnit::Tokens => 1,
            SelectionUnit::Blocks => block_size,
        }
    }

    /// Checks the selection for an entry with `rows` rows over `segments`.
    pub(super) fn check(&self, rows: usize, segments: &[Segment], block_size: usize) -> Result<()> {
        let expected = rows.checked_add(1).ok_or(Error::Overflow { what: "offsets of a selection" })?;
        same("offsets of a selection", expected, self.offsets.len())?;
        same("first offset of a selection", 0, self.offsets[0] as usize)?;
        same("last offset of a selection", self.indices.len(), self.offsets[rows] as usize)?;
        let invalid = |row, reason| Err(Error::InvalidSelection { row, reason });
        if let Some(row) = self.offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            return invalid(row, format!("offset {} is after {}", self.offsets[row], self.offsets[row + 1]));
        }
        let per_unit = self.tokens_per_unit(block_size);
        let units = segments.iter().try_fold(0usize, |sum, s| sum.checked_add(s.len.div_ceil(per_unit)));
        let units = units.ok_or(Error::Overflow { what: "tokens of an entry" })?;
        for row in 0..rows {
            let indices = self.row(row);
            if let Some([a, b, ..]) = indices.windows(2).find(|pair| pair[0] >= pair[1]) {
                return invalid(row, format!("index {a} comes before {b}"));
            }
            if let Some(&last) = indices.last().filter(|&&last| last as usize >= units) {
                return Err(Error::range("selected index", last, units));
            }
        }
        Ok(())
    }
}
