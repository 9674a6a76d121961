//! The lists of a captured step: where kernels find them, and what a replay writes there.
//!
//! All lists lie in few blocks of memory, usually one, so that a replay sends them up by one copy.

use std::sync::Arc;

use kvcore::{Error, MemoryKind, Result, StepInputs, Storage};

use super::lists::last_of_each;
use crate::device::Device;
use crate::kernels::GraphPlan;
use crate::memory::CudaStorage;

/// Least bytes of a block.
const LEAST: usize = 64 << 10;

/// Distance between lists, in bytes: their addresses are multiples of it.
const ALIGNED: usize = 256;

/// A list of the step, in the form in which kernels read it.
pub(crate) enum List {
    /// Tokens below `limit`.
    Tokens {
        limit: usize,
    },
    Positions,
    /// Slots, of which each occurs once; see [`last_of_each`].
    Slots,
    /// Plan of attention.
    Plan(Box<GraphPlan>),
}

struct Listed {
    list: List,
    block: usize,
    at: usize,
    bytes: usize,
}

/// Memory of lists.
#[derive(Default)]
pub(super) struct Inputs {
    /// Memory, and the bytes of it that are in use.
    blocks: Vec<(Arc<dyn Storage>, usize)>,
    lists: Vec<Listed>,
}

impl List {
    /// Returns whether both are the same list of the step. Plans are told apart by their own keys.
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Positions, Self::Positions) | (Self::Slots, Self::Slots) => true,
            (Self::Tokens { limit: a }, Self::Tokens { limit: b }) => a == b,
            _ => false,
        }
    }
}

impl Inputs {
    /// Returns the address of a list of `bytes` bytes, and the memory in which it lies.
    pub(super) fn place(
        &mut self,
        device: &Arc<Device>,
        list: List,
        bytes: usize,
    ) -> Result<(u64, Arc<dyn Storage>)> {
        let known = self.lists.iter().find(|known| known.list.is(&list)).map(|known| (known.block, known.at));
        let (block, at) = if let Some(place) = known {
            place
        } else {
            let (block, at) = self.room(device, bytes)?;
            self.lists.push(Listed { list, block, at, bytes });
            (block, at)
        };
        let storage = &self.blocks[block].0;
        Ok((storage.address() + at as u64, Arc::clone(storage)))
    }

    fn room(&mut self, device: &Arc<Device>, bytes: usize) -> Result<(usize, usize)> {
        if self.blocks.last().is_none_or(|(storage, used)| used + bytes > storage.len()) {
            let size = bytes.next_power_of_two().max(LEAST);
            let storage = CudaStorage::allocate(device, MemoryKind::Device, size)?;
            self.blocks.push((Arc::new(storage), 0));
        }
        let block = self.blocks.len() - 1;
        let used = &mut self.blocks[block].1;
        let at = *used;
        *used = (at + bytes).next_multiple_of(ALIGNED);
        Ok((block, at))
    }

    /// Returns the contents of each block for a step, with the address where they go.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] for another number of rows, [`Error::OutOfRange`] for a token that the table of
    /// embeddings does not have, and [`Error::GraphOutgrown`] if a plan has no room.
    pub(super) fn contents(&self, device: &Arc<Device>, step: &StepInputs) -> Result<Vec<(u64, Vec<u8>)>> {
        let sized = |(storage, used): &(Arc<dyn Storage>, usize)| {
            (storage.address(), vec![0; (*used).min(storage.len())])
        };
        let mut contents: Vec<_> = self.blocks.iter().map(sized).collect();
        for Listed { list, block, at, bytes } in &self.lists {
            let room = &mut contents[*block].1[*at..*at + *bytes];
            let mut put = |what, list: &[u8]| {
                if list.len() != room.len() {
                    let rows = |bytes: usize| bytes * step.positions.len() / list.len().max(1);
                    let (expected, got) = (rows(room.len()), rows(list.len()));
                    return Err(Error::Mismatch { what, expected, got });
                }
                room.copy_from_slice(list);
                Ok(())
            };
            match list {
                List::Tokens { limit } => {
                    if let Some(&token) = step.tokens.iter().find(|&&token| token as usize >= *limit) {
                        let (value, limit) = (token.into(), *limit as i128);
                        return Err(Error::OutOfRange { what: "token", value, limit });
                    }
                    put("tokens of a captured step", bytemuck::cast_slice(&step.tokens))?;
                }
                List::Positions => {
                    put("positions of a captured step", bytemuck::cast_slice(&step.positions))?;
                }
                List::Slots => {
                    let slots = last_of_each(&step.slots, &mut Vec::new());
                    put("slots of a captured step", bytemuck::cast_slice(&slots))?;
                }
                List::Plan(plan) => {
                    put("plan of a captured step", &plan.records(device, &step.work)?)?;
                }
            }
        }
        Ok(contents)
    }
}
