//! The lists of a captured step: their device addresses, and the bytes that a replay writes to them.

use std::ops::Range;
use std::sync::Arc;

use crate::base::Result;
use crate::device::Storage;

/// The minimum size of a memory block, in bytes.
const LEAST: usize = 64 << 10;

/// The lists of a captured step, in memory that each replay overwrites.
///
/// All lists are in a few memory blocks, usually one, because a replay uploads each block with one copy.
#[derive(Debug)]
pub struct StepLists<L> {
    /// Memory blocks, each with the number of bytes in use.
    blocks: Vec<(Arc<dyn Storage>, usize)>,
    /// Each list, with the index of its memory block and its byte range in that block.
    lists: Vec<(L, usize, Range<usize>)>,
}

impl<L> Default for StepLists<L> {
    fn default() -> Self {
        Self { blocks: Vec::new(), lists: Vec::new() }
    }
}

impl<L> StepLists<L> {
    /// Returns the address of the first list for which `is` returns true.
    pub fn find(&self, is: impl Fn(&L) -> bool) -> Option<u64> {
        let (_, block, range) = self.lists.iter().find(|(list, ..)| is(list))?;
        Some(self.blocks[*block].0.address() + range.start as u64)
    }

    /// Adds a list of `bytes` bytes, and returns its address. Lists begin at multiples of `align` bytes from
    /// the start of a block; `align` must be the same in all calls. `allocate` must return a block of at
    /// least the given number of bytes.
    ///
    /// # Errors
    /// Returns the errors of `allocate`.
    pub fn add(
        &mut self,
        list: L,
        bytes: usize,
        align: usize,
        allocate: impl FnOnce(usize) -> Result<Arc<dyn Storage>>,
    ) -> Result<u64> {
        if self.blocks.last().is_none_or(|(storage, used)| used + bytes > storage.len()) {
            self.blocks.push((allocate(bytes.next_power_of_two().max(LEAST))?, 0));
        }
        let block = self.blocks.len() - 1;
        let (storage, used) = &mut self.blocks[block];
        let at = *used;
        *used = (at + bytes).next_multiple_of(align);
        self.lists.push((list, block, at..at + bytes));
        Ok(storage.address() + at as u64)
    }

    /// Returns the new contents and the destination address of each block. `write` fills in the contents of
    /// each list.
    ///
    /// # Errors
    /// Returns the errors of `write`.
    pub fn contents(
        &self,
        mut write: impl FnMut(&L, &mut [u8]) -> Result<()>,
    ) -> Result<Vec<(u64, Vec<u8>)>> {
        let sized = |(storage, used): &(Arc<dyn Storage>, usize)| {
            (storage.address(), vec![0; (*used).min(storage.len())])
        };
        let mut contents: Vec<_> = self.blocks.iter().map(sized).collect();
        for (list, block, range) in &self.lists {
            write(list, &mut contents[*block].1[range.clone()])?;
        }
        Ok(contents)
    }
}
