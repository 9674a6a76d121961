//! The choice of slots for a prompt's chunks.

/// Returns one slot below `slots` per chunk, all different. `stored` lists the slots in which each chunk is
/// stored. As many chunks as possible get a slot in which they are stored; the others get the free slots in
/// order. There must be at least as many slots as chunks.
///
/// The choice is a maximum matching, found with augmenting paths (Kuhn, 1955).
pub(super) fn choose_slots(stored: &[Vec<u32>], slots: u32) -> Vec<u32> {
    let mut owners: Vec<Option<usize>> = vec![None; slots as usize];
    for chunk in 0..stored.len() {
        give_slot(stored, chunk, &mut owners, &mut vec![false; slots as usize]);
    }
    let mut free: Vec<u32> = (0..slots).filter(|&slot| owners[slot as usize].is_none()).rev().collect();
    let own = |chunk| owners.iter().position(|owner| *owner == Some(chunk)).map(|slot| slot as u32);
    (0..stored.len()).filter_map(|chunk| own(chunk).or_else(|| free.pop())).collect()
}

/// Gives a chunk one of its stored slots, if the slot is free or its owner can move to another of its own
/// stored slots. `tried` marks the slots that this search has tried.
fn give_slot(stored: &[Vec<u32>], chunk: usize, owners: &mut [Option<usize>], tried: &mut [bool]) -> bool {
    stored[chunk].iter().any(|&slot| {
        let slot = slot as usize;
        if std::mem::replace(&mut tried[slot], true) {
            return false;
        }
        let free = owners[slot].is_none_or(|owner| give_slot(stored, owner, owners, tried));
        if free {
            owners[slot] = Some(chunk);
        }
        free
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the maximum number of chunks that can have a slot in which they are stored, by trying every
    /// choice.
    fn most(stored: &[Vec<u32>], taken: &mut Vec<u32>) -> usize {
        let Some((first, rest)) = stored.split_first() else { return 0 };
        let mut best = most(rest, taken);
        for &slot in first {
            if !taken.contains(&slot) {
                taken.push(slot);
                best = best.max(1 + most(rest, taken));
                taken.pop();
            }
        }
        best
    }

    #[test]
    fn as_many_chunks_as_possible_get_a_stored_slot() {
        // Every choice of stored slots for three chunks and four slots: four bits per chunk.
        for bits in 0u32..1 << 12 {
            let slots = |chunk: u32| (0..4).filter(move |slot| bits >> (4 * chunk + slot) & 1 == 1).collect();
            let stored: Vec<Vec<u32>> = (0..3).map(slots).collect();
            let chosen = choose_slots(&stored, 4);
            let mut different = chosen.clone();
            different.sort_unstable();
            different.dedup();
            assert_eq!((chosen.len(), different.len()), (3, 3), "{stored:?}: {chosen:?}");
            assert!(chosen.iter().all(|&slot| slot < 4), "{stored:?}: {chosen:?}");
            let hits = chosen.iter().zip(&stored).filter(|(slot, stored)| stored.contains(slot)).count();
            assert_eq!(hits, most(&stored, &mut Vec::new()), "{stored:?}: {chosen:?}");
        }
    }

    #[test]
    fn chunks_that_are_not_stored_get_the_free_slots_in_order() {
        assert_eq!(choose_slots(&[vec![], vec![0], vec![]], 4), [1, 0, 2]);
        assert_eq!(choose_slots(&[vec![2], vec![2]], 2 + 1), [2, 0]);
        assert_eq!(choose_slots(&[vec![1], vec![1, 0]], 2), [1, 0]);
    }
}
