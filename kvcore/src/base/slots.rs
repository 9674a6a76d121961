//! Slot mappings: lists of the slots that the rows of a batch are written to.

use std::ops::Deref;
use std::sync::Arc;

use super::{BlockId, Error, Result};

/// A slot mapping: one slot per row, shared with the operations of every layer.
///
/// A slot is `block * block_size + offset`. A negative slot is padding and is skipped.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlotMapping(Arc<[i64]>);

impl SlotMapping {
    /// Returns the slots in the form that operations expect.
    pub fn slots(&self) -> &Arc<[i64]> {
        &self.0
    }

    /// Creates the slot mapping for some tokens of a run that is stored in `blocks`. `tokens` are indices
    /// into the run.
    ///
    /// ```
    /// use kvcore::{BlockId, SlotMapping};
    /// let slots = SlotMapping::in_blocks(&[BlockId(7), BlockId(3)], 16, [0, 15, 17])?;
    /// assert_eq!(slots.slots()[..], [112, 127, 49]);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `block_size` is 0, and [`Error::OutOfRange`] if a token is past the end of
    /// the blocks.
    pub fn in_blocks(
        blocks: &[BlockId],
        block_size: usize,
        tokens: impl IntoIterator<Item = usize>,
    ) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::Zero { what: "block_size" });
        }
        let slot = |token: usize| match blocks.get(token / block_size) {
            Some(block) => Ok(block.index() as i64 * block_size as i64 + (token % block_size) as i64),
            None => Err(Error::range("token", token, blocks.len() * block_size)),
        };
        Ok(Self(tokens.into_iter().map(slot).collect::<Result<_>>()?))
    }

    /// Replaces the slots. Reuses the memory if the number of slots is unchanged and no operation still holds
    /// it.
    pub(crate) fn refill(&mut self, slots: impl ExactSizeIterator<Item = i64>) {
        match Arc::get_mut(&mut self.0) {
            Some(own) if own.len() == slots.len() => {
                own.iter_mut().zip(slots).for_each(|(own, slot)| *own = slot);
            }
            _ => self.0 = slots.collect(),
        }
    }

    /// Returns the number of rows, including padding.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Concatenates the slots of several sequences.
    pub fn concat<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        Self(parts.into_iter().flat_map(|part| part.0.iter().copied()).collect())
    }
}

impl Deref for SlotMapping {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.0
    }
}

impl<T: Into<Arc<[i64]>>> From<T> for SlotMapping {
    fn from(slots: T) -> Self {
        Self(slots.into())
    }
}
