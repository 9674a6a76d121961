//! Lists in the format that kernels read: lists on the device that a step's layers share, and the lists of a
//! captured step, which each replay writes.

use std::sync::Arc;

use kvcore::device::queue::Recent;
use kvcore::{AttendWork, Error, Result, StepInputs, WritePairs, WriteSlots};

use super::upload::CudaUpload;

/// The number of lists that a stream keeps. A step needs only a few: slots, positions, and the lists for
/// copies.
const KEPT: usize = 8;

/// Identifies a list by its format on the device and by its address and length on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SentKey {
    Numbers(usize, usize),
    Written(usize, usize),
    Pairs(usize, usize),
}

// Decision: docs/decisions/backend-cuda.md#lists-are-identified-by-their-address
/// Keeps a list alive, so that no other list can be allocated at its address.
#[derive(Debug)]
pub(super) enum SentOwner {
    Numbers(#[expect(dead_code, reason = "held so that its place stays taken")] Arc<[i64]>),
    Slots(#[expect(dead_code, reason = "held so that its place stays taken")] WriteSlots),
    Pairs(#[expect(dead_code, reason = "held so that its place stays taken")] WritePairs),
}

/// The lists of a stream's most recent operations.
pub(super) type SentLists = Recent<SentKey, (SentOwner, Arc<CudaUpload>), KEPT>;

/// A function that builds an attention plan's records for a step's work.
pub(crate) type MakeRecords = Box<dyn Fn(&Arc<AttendWork>) -> Result<Vec<u8>> + Send + Sync>;

/// A list of a captured step.
pub(crate) enum StepList {
    /// Token IDs below `limit`.
    Tokens {
        limit: usize,
    },
    Positions,
    /// Slots without duplicates; see [`last_of_each`].
    Slots,
    /// The records of an attention plan.
    Plan(MakeRecords),
}

impl StepList {
    /// Returns true if both values stand for the same list of a step. Two plans never count as the same
    /// here, because plans have their own keys.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Positions, Self::Positions) | (Self::Slots, Self::Slots) => true,
            (Self::Tokens { limit: a }, Self::Tokens { limit: b }) => a == b,
            _ => false,
        }
    }

    /// Writes a step's list to the memory reserved for it.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the number of rows differs from the captured step's,
    /// [`Error::OutOfRange`] if a token ID is outside the embedding table, and [`Error::GraphOutgrown`] if a
    /// plan does not fit.
    pub(super) fn write(&self, step: &StepInputs, room: &mut [u8]) -> Result<()> {
        let mut put = |what, list: &[u8]| {
            if list.len() != room.len() {
                let rows = |bytes: usize| bytes * step.positions.len() / list.len().max(1);
                return Err(Error::mismatch(what, rows(room.len()), rows(list.len())));
            }
            room.copy_from_slice(list);
            Ok(())
        };
        match self {
            Self::Tokens { limit } => {
                if let Some(&token) = step.tokens.iter().find(|&&token| token as usize >= *limit) {
                    let (value, limit) = (token.into(), *limit as i128);
                    return Err(Error::OutOfRange { what: "token", value, limit });
                }
                put("tokens of a captured step", bytemuck::cast_slice(&step.tokens))
            }
            Self::Positions => put("positions of a captured step", bytemuck::cast_slice(&step.positions)),
            Self::Slots => {
                let slots = last_of_each(&step.slots, &mut Vec::new());
                put("slots of a captured step", bytemuck::cast_slice(&slots))
            }
            Self::Plan(records) => put("plan of a captured step", &records(&step.work)?),
        }
    }
}

// Decision: docs/decisions/backend-cuda.md#if-rows-share-a-slot-the-last-one-is-written
/// Returns a copy of the slots. If several rows have the same slot, all but the last become padding.
/// `sorting` is a scratch buffer.
pub(super) fn last_of_each(slots: &[i64], sorting: &mut Vec<(i64, usize)>) -> Vec<i64> {
    let mut unique = slots.to_vec();
    if slots.windows(2).all(|pair| pair[0] < pair[1]) {
        return unique;
    }
    sorting.clear();
    sorting.extend(slots.iter().copied().zip(0..).filter(|(slot, _)| *slot >= 0));
    sorting.sort_unstable();
    for pair in sorting.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        unique[pair[0].1] = -1;
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_of_a_slot_stays() {
        let mut sorting = Vec::new();
        assert_eq!(last_of_each(&[3, 4, 9], &mut sorting), [3, 4, 9]);
        assert_eq!(last_of_each(&[-1, -1, 5], &mut sorting), [-1, -1, 5]);
        assert_eq!(last_of_each(&[7, 2, 7, -1, 2, 7], &mut sorting), [-1, -1, -1, -1, 2, 7]);
    }
}
