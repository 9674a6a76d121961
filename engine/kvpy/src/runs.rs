//! Rows of a cache, in the forms in which Python passes them.

use kvcore::{Error, SlotMapping};
use pyo3::prelude::*;

use crate::error::Result;
use crate::tensor::Integers;

/// A run of tokens in blocks: the block IDs in order, the first token's offset from the start of the first
/// block, and the number of tokens.
#[derive(Debug, FromPyObject)]
pub(crate) struct BlockRun(Vec<i64>, usize, usize);

/// Rows of a cache: tokens in blocks, or a list of slots.
#[derive(Debug, FromPyObject)]
pub(crate) enum CacheRows {
    Run(BlockRun),
    Slots(Integers),
}

impl CacheRows {
    /// Returns the rows' slots in a cache with blocks of `block_size` tokens. Tokens in a negative block have
    /// slot -1.
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if tokens are past the last block of a run, and [`Error::OutOfRange`] if a
    /// block's slots are too large for an integer.
    pub(crate) fn slots(self, block_size: usize) -> Result<SlotMapping> {
        match self {
            Self::Run(BlockRun(blocks, first, count)) => run_slots(&blocks, first, count, block_size),
            Self::Slots(slots) => Ok(slots.0.into()),
        }
    }
}

fn run_slots(blocks: &[i64], first: usize, count: usize, block_size: usize) -> Result<SlotMapping> {
    let (end, most) = (first.saturating_add(count), blocks.len().saturating_mul(block_size));
    if end > most {
        return Err(Error::TooLarge {
            what: "end of a run of tokens",
            value: end as i128,
            most: most as i128,
        }
        .into());
    }
    let limit = i64::MAX / block_size.max(1) as i64;
    if let Some(&block) = blocks.iter().find(|&&block| block >= limit) {
        return Err(Error::OutOfRange { what: "block", value: block.into(), limit: limit.into() }.into());
    }
    let slot = |token: usize| match blocks[token / block_size] {
        block if block < 0 => -1,
        block => block * block_size as i64 + (token % block_size) as i64,
    };
    Ok((first..end).map(slot).collect::<Vec<_>>().into())
}
