//! The lists that each replay of a graph writes.

use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result, StepInputs, Storage};

use crate::device::Npu;
use crate::memory::AscendStorage;

/// Makes a list of a step, as the operators of a graph read it.
pub(crate) type MakeList = Box<dyn Fn(&StepInputs) -> Result<Vec<u8>> + Send + Sync>;

/// A list that each replay writes, and its place in a block of memory.
struct ReplayList {
    block: usize,
    at: usize,
    bytes: usize,
    make: MakeList,
}

/// Least bytes of a block of lists.
const BLOCK: usize = 64 << 10;

/// Alignment of lists in their block, in bytes.
const ALIGN: usize = 64;

/// The lists of a graph. They lie in few blocks of memory, usually one, so a replay sends them by one copy.
#[derive(Default)]
pub(super) struct ReplayLists {
    /// Memory, and the bytes of it that are in use.
    blocks: Vec<(Arc<dyn Storage>, usize)>,
    lists: Vec<ReplayList>,
}

impl ReplayLists {
    /// Adds a list of `bytes` bytes. Returns its address on the device.
    pub(super) fn add(&mut self, npu: &Arc<Npu>, bytes: usize, make: MakeList) -> Result<u64> {
        if self.blocks.last().is_none_or(|(storage, used)| used + bytes > storage.len()) {
            let size = bytes.next_power_of_two().max(BLOCK);
            let made = AscendStorage::uninitialised(npu, MemoryKind::Device, size)?;
            self.blocks.push((Arc::new(made), 0));
        }
        let block = self.blocks.len() - 1;
        let (storage, used) = &mut self.blocks[block];
        let at = *used;
        *used = (at + bytes).next_multiple_of(ALIGN);
        self.lists.push(ReplayList { block, at, bytes, make });
        Ok(storage.address() + at as u64)
    }

    /// Returns the contents of each block for a step, with the address that they are copied to.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] for a step with another number of rows, and the errors of the lists.
    pub(super) fn contents(&self, step: &StepInputs) -> Result<Vec<(u64, Vec<u8>)>> {
        let sized = |(storage, used): &(Arc<dyn Storage>, usize)| {
            (storage.address(), vec![0; (*used).min(storage.len())])
        };
        let mut contents: Vec<_> = self.blocks.iter().map(sized).collect();
        for ReplayList { block, at, bytes, make } in &self.lists {
            let (made, expected) = (make(step)?, *bytes);
            if made.len() != expected {
                return Err(Error::mismatch("bytes of a list of a captured step", expected, made.len()));
            }
            contents[*block].1[*at..*at + expected].copy_from_slice(&made);
        }
        Ok(contents)
    }
}
