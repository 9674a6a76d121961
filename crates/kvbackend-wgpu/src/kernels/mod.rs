//! Operations of the contract, lowered to runs of kernels.
//!
//! | operation | shader |
//! |---|---|
//! | scatter, gather of rows in the arena's type; copy_blocks, swap_blocks, copy_tensor; V of rotate_keys | `copy_units`, or `copy_bytes` where something is no multiple of 16 bytes |
//! | scatter and gather with another type or format, gather with a rotation, rope, K of rotate_keys, quantize, dequantize | `convert_rows` |
//! | attend, attend_mla, with selections and of every format | `attend`, then `merge` |

use std::sync::Arc;

use kvcore::{
    ApplyRope, Attend, AttendMla, CopyBlocks, CopyTensor, Counters, Dequantize, Gather, Kernels, KvArena,
    Quantize, Result, RotateKeys, Scatter, Storage, SwapBlocks, TensorView,
};

use crate::device::Device;
use crate::memory;
use crate::stream::WgpuStream;

mod angles;
mod attend;
mod convert;
pub(crate) mod copy;
mod places;
mod rows;

/// Refuses storages of other devices before anything is enqueued.
fn ours(device: &Arc<Device>, arenas: &[&KvArena], views: &[&TensorView]) -> Result<()> {
    let check = |storage: &Arc<dyn Storage>| memory::of(device, storage).map(drop);
    arenas.iter().flat_map(|arena| arena.storages()).try_for_each(check)?;
    views.iter().try_for_each(|view| check(view.storage()))
}

fn ours_in_attend(device: &Arc<Device>, op: &Attend) -> Result<()> {
    ours(device, &[&op.arena], &[&op.q, &op.out])?;
    op.lse.as_ref().map_or(Ok(()), |lse| ours(device, &[], &[lse]))
}

impl Kernels for WgpuStream {
    fn scatter(&self, op: &Scatter) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.arena], &[&op.k, &op.v])?;
        self.run(rows::scatter(self.device(), op)?)?;
        Counters::add(&self.device().counters.scatter_bytes, op.bytes());
        Ok(())
    }

    fn gather(&self, op: &Gather) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.arena], &[&op.k, &op.v])?;
        self.run(rows::gather(self.device(), op)?)?;
        Counters::add(&self.device().counters.gather_bytes, op.bytes());
        Ok(())
    }

    fn copy_blocks(&self, op: &CopyBlocks) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.arena], &[])?;
        self.run(copy::copy_blocks(self.device(), op)?)?;
        Counters::add(&self.device().counters.block_copy_bytes, op.bytes());
        Ok(())
    }

    fn swap_blocks(&self, op: &SwapBlocks) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.src, &op.dst], &[])?;
        self.run(copy::swap_blocks(self.device(), op)?)?;
        Counters::add(&self.device().counters.block_copy_bytes, op.bytes());
        Ok(())
    }

    fn copy_tensor(&self, op: &CopyTensor) -> Result<()> {
        op.check()?;
        ours(self.device(), &[], &[&op.src, &op.dst])?;
        self.run(copy::copy_tensor(self.device(), op)?)?;
        Counters::add(&self.device().counters.tensor_copy_bytes, op.bytes());
        Ok(())
    }

    fn rope(&self, op: &ApplyRope) -> Result<()> {
        op.check()?;
        ours(self.device(), &[], &[&op.rows])?;
        self.run(convert::rope(self.device(), op)?)
    }

    fn rotate_keys(&self, op: &RotateKeys) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.src, &op.dst], &[])?;
        self.run(convert::rotate_keys(self.device(), op)?)?;
        Counters::add(&self.device().counters.block_copy_bytes, op.bytes());
        Ok(())
    }

    fn attend(&self, op: &Attend) -> Result<()> {
        op.check()?;
        ours_in_attend(self.device(), op)?;
        self.run(attend::attend(self, op)?)?;
        Counters::add(&self.device().counters.attend_calls, 1);
        Ok(())
    }

    fn attend_mla(&self, op: &AttendMla) -> Result<()> {
        op.check()?;
        ours_in_attend(self.device(), &op.attend)?;
        ours(self.device(), &[], &[&op.q_latent])?;
        self.run(attend::attend_mla(self, op)?)?;
        Counters::add(&self.device().counters.attend_calls, 1);
        Ok(())
    }

    fn quantize(&self, op: &Quantize) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.src, &op.dst], &[])?;
        self.run(convert::quantize(self.device(), op)?)?;
        Counters::add(&self.device().counters.quantize_bytes, op.bytes());
        Ok(())
    }

    fn dequantize(&self, op: &Dequantize) -> Result<()> {
        op.check()?;
        ours(self.device(), &[&op.src, &op.dst], &[])?;
        self.run(convert::dequantize(self.device(), op)?)?;
        Counters::add(&self.device().counters.dequantize_bytes, op.bytes());
        Ok(())
    }
}
