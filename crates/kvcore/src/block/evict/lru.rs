//! Least recently released first: an intrusive list over indices, no allocation per block.

use super::EvictionPolicy;

const NONE: u32 = u32::MAX;

/// Least recently used. Time counts from the moment the last holder let go.
#[derive(Debug)]
pub struct Lru {
    /// `(older, newer)` neighbours; the element at `blocks` is the list's head.
    links: Vec<(u32, u32)>,
    len: usize,
}

impl Lru {
    /// An empty order for `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        let head = blocks as u32;
        let mut links = vec![(NONE, NONE); blocks + 1];
        links[blocks] = (head, head);
        Self { links, len: 0 }
    }

    fn head(&self) -> u32 {
        self.links.len() as u32 - 1
    }

    fn unlink(&mut self, block: u32) {
        let (older, newer) = std::mem::replace(&mut self.links[block as usize], (NONE, NONE));
        self.links[older as usize].1 = newer;
        self.links[newer as usize].0 = older;
        self.len -= 1;
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, block: u32) {
        let head = self.head();
        let newest = self.links[head as usize].0;
        self.links[block as usize] = (newest, head);
        self.links[newest as usize].1 = block;
        self.links[head as usize].0 = block;
        self.len += 1;
    }

    fn remove(&mut self, block: u32) {
        self.unlink(block);
    }

    fn evict(&mut self) -> Option<u32> {
        let oldest = self.links[self.head() as usize].1;
        (oldest != self.head()).then(|| {
            self.unlink(oldest);
            oldest
        })
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first_and_removed_ones_never() {
        let mut lru = Lru::new(4);
        for block in [2, 0, 3, 1] {
            lru.insert(block);
        }
        lru.remove(0);
        lru.remove(2);
        lru.insert(2);
        assert_eq!(std::iter::from_fn(|| lru.evict()).collect::<Vec<_>>(), [3, 1, 2]);
        assert!(lru.is_empty());
    }
}
