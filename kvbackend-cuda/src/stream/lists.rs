//! Lists that are on the device already. The layers of a step share their slots, positions and pairs of blocks.

use std::sync::Arc;

use kvcore::{WritePairs, WriteSlots};

use super::upload::Upload;

/// Number of lists that a stream keeps. A step has few: slots, positions, and those of copies.
const KEPT: usize = 8;

/// A list by its place in the host's memory, and the form in which it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListKey {
    Numbers(usize, usize),
    Written(usize, usize),
    Pairs(usize, usize),
}

/// Keeps a list where it is: while it is held, no other list has its place, and nobody changes it.
#[derive(Debug)]
pub(super) enum ListOwner {
    Numbers(#[expect(dead_code, reason = "held so that its place stays taken")] Arc<[i64]>),
    Slots(#[expect(dead_code, reason = "held so that its place stays taken")] WriteSlots),
    Pairs(#[expect(dead_code, reason = "held so that its place stays taken")] WritePairs),
}

/// The lists of the last operations of a stream.
#[derive(Debug, Default)]
pub(super) struct Lists {
    kept: [Option<(ListKey, ListOwner, Arc<Upload>)>; KEPT],
    next: usize,
}

impl Lists {
    /// Returns a list that was sent before.
    pub(super) fn get(&self, key: ListKey) -> Option<Arc<Upload>> {
        self.kept.iter().flatten().find(|(known, ..)| *known == key).map(|(.., upload)| Arc::clone(upload))
    }

    /// Keeps a list in place of the oldest.
    pub(super) fn keep(&mut self, key: ListKey, owner: ListOwner, upload: &Arc<Upload>) {
        self.kept[self.next] = Some((key, owner, Arc::clone(upload)));
        self.next = (self.next + 1) % KEPT;
    }
}

/// Returns the slots with all but the last row of each slot turned to padding. `sorting` is memory to work in.
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
