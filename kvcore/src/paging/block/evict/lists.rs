//! Doubly linked lists over block indices, from which the policies are built. A block is in at most one list.
//! No method allocates after construction.

const NONE: u32 = u32::MAX;

/// Several lists over one range of indices, each from oldest to newest.
#[derive(Debug)]
pub(super) struct LinkedLists {
    /// The `(older, newer)` neighbours of each block, followed by the heads of the lists. A head closes its
    /// list into a ring.
    links: Vec<(u32, u32)>,
    /// Index of the list that each block is in, or the number of lists if it is in none.
    home: Vec<u8>,
    lens: Vec<usize>,
    blocks: u32,
}

impl LinkedLists {
    pub(super) fn new(blocks: usize, lists: u8) -> Self {
        let n = blocks as u32;
        let mut links = vec![(NONE, NONE); blocks];
        links.extend((0..u32::from(lists)).map(|list| (n + list, n + list)));
        Self { links, home: vec![lists; blocks], lens: vec![0; usize::from(lists)], blocks: n }
    }

    /// Returns the index of the list that a block is in, or `None` if it is in no list.
    pub(super) fn list_of(&self, block: u32) -> Option<u8> {
        let list = self.home[block as usize];
        (usize::from(list) < self.lens.len()).then_some(list)
    }

    /// Appends a block, which must not be in a list.
    pub(super) fn push(&mut self, list: u8, block: u32) {
        let head = self.blocks + u32::from(list);
        let newest = self.links[head as usize].0;
        self.links[block as usize] = (newest, head);
        self.links[newest as usize].1 = block;
        self.links[head as usize].0 = block;
        self.home[block as usize] = list;
        self.lens[usize::from(list)] += 1;
    }

    /// Removes a block from its list. Returns `false` if it is not in a list.
    pub(super) fn unlink(&mut self, block: u32) -> bool {
        let Some(list) = self.list_of(block) else { return false };
        let (older, newer) = std::mem::replace(&mut self.links[block as usize], (NONE, NONE));
        self.links[older as usize].1 = newer;
        self.links[newer as usize].0 = older;
        self.home[block as usize] = self.lens.len() as u8;
        self.lens[usize::from(list)] -= 1;
        true
    }

    /// Returns the oldest block of a list without removing it.
    pub(super) fn oldest(&self, list: u8) -> Option<u32> {
        let oldest = self.links[(self.blocks + u32::from(list)) as usize].1;
        (oldest < self.blocks).then_some(oldest)
    }

    /// Returns the newest block of a list without removing it.
    pub(super) fn newest(&self, list: u8) -> Option<u32> {
        let newest = self.links[(self.blocks + u32::from(list)) as usize].0;
        (newest < self.blocks).then_some(newest)
    }

    /// Removes and returns the oldest block of a list.
    pub(super) fn pop(&mut self, list: u8) -> Option<u32> {
        let block = self.oldest(list)?;
        self.unlink(block);
        Some(block)
    }

    pub(super) fn len(&self, list: u8) -> usize {
        self.lens[usize::from(list)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order_and_share_no_block() {
        let mut lists = LinkedLists::new(5, 2);
        for block in [3, 0, 4] {
            lists.push(0, block);
        }
        lists.push(1, 1);
        assert_eq!((lists.list_of(4), lists.list_of(1), lists.list_of(2)), (Some(0), Some(1), None));
        assert!(lists.unlink(0) && !lists.unlink(0) && !lists.unlink(2));
        lists.push(1, 0);
        assert_eq!((lists.len(0), lists.len(1), lists.oldest(1)), (2, 2, Some(1)));
        assert_eq!((lists.newest(0), lists.newest(1)), (Some(4), Some(0)));
        assert_eq!(std::iter::from_fn(|| lists.pop(0)).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(std::iter::from_fn(|| lists.pop(1)).collect::<Vec<_>>(), [1, 0]);
        assert_eq!((lists.len(0), lists.oldest(0)), (0, None));
    }
}
