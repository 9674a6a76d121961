//! The rotated copy: an assembled prompt as one segment, for kernels that do not read segments.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvcore::{
    Backend, BlockId, BlockPool, DType, Gather, KeyForm, KvArena, KvFormat, LayerRopes, MemoryKind, Rotation,
    Scatter, Segment, SlotMapping, Stream, WriteSlots, allocate_tensor,
};

use super::AssembledPrompt;
use crate::error::{Error, Result};
use crate::position::MergedRun;

// Decision: docs/decisions/chunks.md#a-rotated-copy-is-written-slot-by-slot
/// The system prompt and the chunks in one run of blocks, in token order, with the keys rotated to the
/// positions where they are used.
///
/// Blocks that already have the run's layout and positions are shared; all other blocks belong to the
/// request. Each copy reads the stored original and writes to other blocks. The copied keys are rounded once
/// more than keys that are read by a rotated query.
#[derive(Debug, Clone)]
pub struct RotatedCopy {
    merged: MergedRun,
    moves: Vec<Move>,
}

/// The tokens to copy whose keys are rotated by the same distance.
#[derive(Debug, Clone)]
struct Move {
    delta: i64,
    from: Arc<[i64]>,
    to: WriteSlots,
}

impl AssembledPrompt {
    /// Allocates the request's own blocks from `pool`, for all tokens whose blocks a single run cannot share.
    /// Returns the run and the copies to make. The blocks are held until this prompt is dropped. The prompt's
    /// [`segments`](Self::segments) do not change.
    ///
    /// Keys that are stored unrotated are copied unchanged, because the kernel that reads them rotates them.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if the pool has no room. Nothing changes in that case.
    pub fn rotated_copy(&mut self, keys: KeyForm, pool: &BlockPool) -> Result<RotatedCopy> {
        let block_size = self.block_size();
        let parts = MergedRun::new(self.segments(), block_size)?;
        let delta = |segment: &Segment| match keys {
            KeyForm::Rotated => segment.position_offset,
            KeyForm::Unrotated => 0,
        };
        let deltas = self.segments().iter().flat_map(|segment| (0..segment.len).map(move |_| delta(segment)));
        let tokens: Vec<(i64, i64)> = parts.slot_mapping.slots().iter().copied().zip(deltas).collect();
        let shared: Vec<Option<BlockId>> =
            tokens.chunks(block_size).map(|tokens| as_it_lies(tokens, block_size)).collect();
        let own = pool.allocate(shared.iter().filter(|block| block.is_none()).count())?;
        let mut fresh = own.ids().iter();
        let block_ids: Vec<BlockId> =
            shared.iter().filter_map(|block| block.or_else(|| fresh.next().copied())).collect();
        let slot_mapping = SlotMapping::in_blocks(&block_ids, block_size, 0..parts.total_tokens)?;
        let mut moves: BTreeMap<i64, (Vec<i64>, Vec<i64>)> = BTreeMap::new();
        for (at, (&(from, delta), &to)) in tokens.iter().zip(slot_mapping.slots().iter()).enumerate() {
            if shared[at / block_size].is_none() {
                let (sources, targets) = moves.entry(delta).or_default();
                sources.push(from);
                targets.push(to);
            }
        }
        let moves = moves.into_iter().map(|(delta, (from, to))| {
            Ok(Move { delta, from: from.into(), to: own.write_slots(block_size, to)? })
        });
        let moves = moves.collect::<Result<_>>()?;
        self.hold(own);
        Ok(RotatedCopy { merged: MergedRun { slot_mapping, block_ids, ..parts }, moves })
    }
}

/// Returns the block that already contains these tokens, starting at its first slot, in order and at their
/// final positions. `tokens` contains each token's slot and the distance to rotate its key by. Returns `None`
/// if there is no such block.
fn as_it_lies(tokens: &[(i64, i64)], block_size: usize) -> Option<BlockId> {
    let (first, _) = tokens.first()?;
    let in_place = |(at, &(slot, delta)): (i64, &(i64, i64))| slot == first + at && delta == 0;
    let block = u32::try_from(first / block_size as i64).ok()?;
    (first % block_size as i64 == 0 && (0..).zip(tokens).all(in_place)).then_some(BlockId(block))
}

impl RotatedCopy {
    /// Enqueues the copies: a `gather`, which rotates, and a `scatter` for each layer and distance. `ropes`
    /// must be the request's embeddings. The intermediate rows stay allocated until the copies have run.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if there are fewer embeddings than layers, and the backend's
    /// errors.
    pub fn enqueue(
        &self,
        backend: &dyn Backend,
        stream: &dyn Stream,
        arena: &KvArena,
        ropes: &LayerRopes,
    ) -> Result<()> {
        let shape = arena.layout().shape();
        let dtype = match shape.format {
            KvFormat::Dense(dtype) => dtype,
            _ => DType::F32,
        };
        for Move { delta, from, to } in &self.moves {
            let rows =
                |heads, dim| allocate_tensor(backend, MemoryKind::Device, dtype, &[from.len(), heads, dim]);
            let (k, v) = (rows(shape.k_heads, shape.k_dim)?, rows(shape.v_heads, shape.v_dim)?);
            for layer in 0..shape.num_layers {
                let rope = ropes.layers().get(layer).map(Arc::clone).ok_or(kvcore::Error::OutOfRange {
                    what: "layer with an embedding",
                    value: layer as i128,
                    limit: ropes.layers().len() as i128,
                })?;
                let rotation = (*delta != 0).then_some(Rotation { rope, delta: *delta });
                let (arena, k, v) = (arena.clone(), k.clone(), v.clone());
                let (slots, targets) = (Arc::clone(from), to.clone());
                stream.gather(&Gather {
                    arena: arena.clone(),
                    layer,
                    slots,
                    k: k.clone(),
                    v: v.clone(),
                    rotation,
                })?;
                stream.scatter(&Scatter { arena, layer, k, v, slots: targets, rotation: None })?;
            }
        }
        Ok(())
    }

    /// Returns the run, with its slots, blocks and positions.
    pub fn merged(&self) -> &MergedRun {
        &self.merged
    }

    /// Returns the number of copied tokens. The other tokens are in shared blocks.
    pub fn copied_tokens(&self) -> usize {
        self.moves.iter().map(|group| group.from.len()).sum()
    }

    /// Returns the run as one segment without an offset, for rotated keys and for kernels that only need the
    /// order of tokens. Token n is treated as being at position n, regardless of its real position. This is
    /// wrong for a sliding window or unrotated keys; use [`segment_by_position`](Self::segment_by_position)
    /// in those cases.
    pub fn segment(&self) -> Segment {
        Segment::new(self.merged.block_ids.as_slice().into(), self.merged.total_tokens, 0, 0)
    }

    // Decision: docs/decisions/chunks.md#a-single-segment-is-read-by-order-or-has-consecutive-positions
    /// Returns the run as one segment if every token n is at position n. Unlike the result of
    /// [`segment`](Self::segment), this segment is also correct for a sliding window and unrotated keys.
    ///
    /// # Errors
    /// Returns [`Error::NotInARow`] if the chunks' positions overlap, because a single segment cannot
    /// describe them.
    pub fn segment_by_position(&self) -> Result<Segment> {
        let stray = (0..).zip(&self.merged.positions).find(|(index, position)| index != *position);
        match stray {
            Some((index, &position)) => Err(Error::NotInARow { index, position }),
            None => Ok(self.segment()),
        }
    }
}
