//! Slot mappings: which slot each row of a batch goes to.

use std::sync::Arc;

use crate::base::{BlockId, Error, PADDING_SLOT, Result};

/// One slot per row, shared with the operations of every layer.
///
/// A slot is `block * block_size + offset`; a negative slot is padding and is skipped.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SlotMapping(Arc<[i64]>);

impl SlotMapping {
    /// The slots as an operation takes them.
    pub fn slots(&self) -> &Arc<[i64]> {
        &self.0
    }

    /// The slots of some tokens of a run that lies in `blocks`, by their index in it.
    ///
    /// ```
    /// use kvcore::{BlockId, SlotMapping};
    /// let slots = SlotMapping::in_blocks(&[BlockId(7), BlockId(3)], 16, [0, 15, 17])?;
    /// assert_eq!(slots.slots()[..], [112, 127, 49]);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Zero`] for a block size of 0, [`Error::OutOfRange`] for a token past the blocks.
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

    /// Takes other slots in place of these: in the same memory, if there are as many and no operation holds it.
    pub(super) fn refill(&mut self, slots: impl ExactSizeIterator<Item = i64>) {
        match Arc::get_mut(&mut self.0) {
            Some(own) if own.len() == slots.len() => {
                own.iter_mut().zip(slots).for_each(|(own, slot)| *own = slot);
            }
            _ => self.0 = slots.collect(),
        }
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The same slots followed by padding up to `rows` rows, for kernels of a fixed shape.
    ///
    /// ```
    /// use kvcore::SlotMapping;
    /// let slots: SlotMapping = vec![4, 5].into();
    /// assert_eq!(slots.padded(4).slots()[..], [4, 5, -1, -1]);
    /// ```
    #[must_use]
    pub fn padded(&self, rows: usize) -> Self {
        let padding = rows.saturating_sub(self.len());
        Self(self.0.iter().copied().chain(std::iter::repeat_n(PADDING_SLOT, padding)).collect())
    }

    /// The rows of several sequences after one another.
    pub fn concat<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        Self(parts.into_iter().flat_map(|part| part.0.iter().copied()).collect())
    }
}

impl From<Vec<i64>> for SlotMapping {
    fn from(slots: Vec<i64>) -> Self {
        Self(slots.into())
    }
}
