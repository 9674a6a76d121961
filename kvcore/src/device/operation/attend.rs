//! Grouped-query attention (GQA) over segments.
//!
//! A *segment* is a run of cached tokens together with their use in a request: their logical order in the
//! prompt, and the offset from the positions that the keys were rotated to. Several requests may use one
//! physical block at the same time, in segments with different offsets. The keys are not changed; instead,
//! the query is rotated once per distinct offset.

use std::ops::Range;
use std::sync::Arc;

use super::entry::Storages;
use super::work::Facts;
use super::{AttendRows, AttendWork, QueryRow, apart, check_rotary, computable, innermost_dense, writable};
use crate::base::{BlockId, DType, Error, KeyForm, Result, Rope, same};
use crate::device::{KvArena, TensorView};

/// A run of cached tokens, as used by one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// Blocks, in order. Token `j` is in `blocks[j / block_size]`.
    pub blocks: Arc<[BlockId]>,
    /// Number of tokens in the run, at most `blocks.len() * block_size`.
    pub len: usize,
    /// Logical index of the first token. Causality depends on the logical index, never on the position.
    pub logical_start: usize,
    // Decision: docs/decisions/device.md#a-segment-has-a-stored_start
    /// Position that the first key was rotated to when it was stored.
    pub stored_start: i64,
    /// The position at which a key is used minus the position that it was rotated to when it was stored.
    pub position_offset: i64,
    /// Factor that multiplies the segment's logits (an inverse temperature). 1 for plain attention.
    pub logit_scale: f32,
    /// Index of the segment's merge group in [`AttendWork::groups`].
    pub merge_group: usize,
}

impl Segment {
    /// Creates a segment with plain softmax semantics, used at its stored position.
    pub fn new(blocks: Arc<[BlockId]>, len: usize, logical_start: usize, stored_start: i64) -> Self {
        Self {
            blocks,
            len,
            logical_start,
            stored_start,
            position_offset: 0,
            logit_scale: 1.0,
            merge_group: 0,
        }
    }

    /// Returns the position at which the key of token `token` is used.
    pub fn position(&self, token: i64) -> i64 {
        self.stored_start.saturating_add(self.position_offset).saturating_add(token)
    }

    /// Sets the offset from the stored positions to the positions where the keys are used.
    #[must_use]
    pub fn at_offset(mut self, offset: i64) -> Self {
        self.position_offset = offset;
        self
    }
}

/// A group of segments, whose partial results are merged first, before the groups are merged with each other.
///
/// The log-sum-exp of the group is multiplied by `lse_scale` before the groups are merged. Together with a
/// temperature in [`Segment::logit_scale`], this is APE's context scaling (Yang et al., 2025).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergeGroup {
    // Decision: docs/decisions/device.md#a-merge-group-has-a-scale
    /// Factor that multiplies the group's log-sum-exp. 1 for plain attention.
    pub lse_scale: f32,
}

impl Default for MergeGroup {
    fn default() -> Self {
        Self { lse_scale: 1.0 }
    }
}

/// Attention for any mix of prefill and decode rows in a single call.
///
/// For each row and head, the result is `softmax(scale * logit_scale * q·k) v` over the tokens of the row's
/// segments that satisfy three conditions: the logical index is at most the row's, the position is inside the
/// window, and the token is selected if the entry has a [`Selection`](super::Selection). Query head `h` of
/// `heads` reads head `h * k_heads / heads` of K and `h * v_heads / heads` of V. The result for a row without
/// such tokens is zeros, with a log-sum-exp of −∞.
///
/// Everything is computed in f32 and rounded once, with one exception: if queries, cache and output all have
/// the same 16-bit type, a device's matrix units may round the rotated queries and the softmax weights to
/// that type.
#[derive(Debug, Clone)]
pub struct Attend {
    /// Arena that holds the keys and values.
    pub arena: KvArena,
    /// Layer index.
    pub layer: usize,
    /// Queries `[rows, heads, k_dim]`, *not* rotated if `rope` is given.
    pub q: TensorView,
    // Decision: docs/decisions/device.md#attend-rotates-the-query
    /// Rotary embedding that rotates each query by its position minus the segment's offset. If it is
    /// `None`, the queries must already be rotated and every offset must be 0.
    pub rope: Option<Arc<Rope>>,
    /// Form of the keys in the arena. Unrotated keys are rotated as they are read: token `j` of a segment to
    /// `stored_start + position_offset + j`, with the attention factor. In this case queries are rotated to
    /// their own position, and `rope` must be given.
    pub keys: KeyForm,
    /// Query rows, one per row of `q`, with their segments and merge groups. Shared by all layers of a
    /// step.
    pub work: Arc<AttendWork>,
    /// Softmax scale, usually `1 / sqrt(k_dim)`.
    pub scale: f32,
    /// Sliding window: a row attends to a token only if `query position − key position < window`.
    pub window: Option<usize>,
    /// Soft-cap `c`: logits become `c * tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// Output `[rows, heads, v_dim]`.
    pub out: TensorView,
    /// Log-sum-exp of each row and head, `[rows, heads]` in f32. Must not overlap any other operand.
    pub lse: Option<TensorView>,
}

impl Attend {
    /// Creates attention for queries that are already rotated, with the softmax scale `1 / sqrt(k_dim)` and
    /// no window or soft-cap. A literal that ends in `..Attend::new(…)` stays valid when a field is added.
    pub fn new(
        arena: &KvArena,
        layer: usize,
        q: TensorView,
        work: &Arc<AttendWork>,
        out: TensorView,
    ) -> Self {
        Self {
            arena: arena.clone(),
            layer,
            q,
            rope: None,
            keys: KeyForm::Rotated,
            work: Arc::clone(work),
            scale: 1.0 / (arena.layout().shape().k_dim as f32).sqrt(),
            window: None,
            softcap: None,
            out,
            lse: None,
        }
    }

    /// Sets the rotary embedding, so that the attention rotates the queries.
    #[must_use]
    pub fn rotating(mut self, rope: &Arc<Rope>) -> Self {
        self.rope = Some(Arc::clone(rope));
        self
    }
}

impl Attend {
    /// Returns the tokens of a segment that a row may attend to if there is no selection: from the first
    /// token inside the window up to the row's own logical index.
    pub fn visible(&self, segment: &Segment, row: QueryRow) -> Range<usize> {
        let end = row.logical.saturating_add(1).saturating_sub(segment.logical_start).min(segment.len);
        let Some(window) = self.window else { return 0..end };
        let distance =
            i128::from(row.position) - i128::from(segment.stored_start) - i128::from(segment.position_offset);
        let start = (distance - window as i128 + 1).clamp(0, end as i128);
        start as usize..end
    }

    /// Returns the runs of tokens that row `row` of an entry attends to, in order. These are the visible
    /// tokens, limited to the selection if the entry has one. Runs may be empty.
    pub fn seen<'a>(&self, entry: &'a AttendRows, row: usize) -> Vec<(&'a Segment, Range<usize>)> {
        let at = self.work.rows()[row];
        let Some(selection) = &entry.selection else {
            return entry.segments.iter().map(|segment| (segment, self.visible(segment, at))).collect();
        };
        let per_unit = selection.tokens_per_unit(self.arena.layout().shape().block_size);
        let (mut runs, mut first, mut left) = (Vec::new(), 0, selection.row(row - entry.rows.start));
        for segment in entry.segments.iter() {
            let visible = self.visible(segment, at);
            let next = first + segment.len.div_ceil(per_unit);
            let (here, rest) = left.split_at(left.partition_point(|&index| (index as usize) < next));
            for &index in here {
                let token = (index as usize - first) * per_unit;
                runs.push((segment, token.max(visible.start)..(token + per_unit).min(visible.end)));
            }
            (first, left) = (next, rest);
        }
        runs
    }

    /// Checks shapes, segments and positions. Grows the table of sines and cosines if needed.
    ///
    /// # Errors
    /// - Returns [`Error::Mismatch`] if extents do not match.
    /// - Returns [`Error::Zero`] if there are no query heads, and [`Error::NotMultiple`] if the number of query
    ///   heads is not a multiple of the number of cache heads.
    /// - Returns [`Error::NotComputed`] or [`Error::Mismatch`] if an element type is not supported.
    /// - Returns [`Error::InvalidStrides`] if the last axis of queries or output is not dense, or if two
    ///   elements of `out` or `lse` share an address.
    /// - Returns [`Error::OutOfRange`] if a layer, block, merge group or position is out of range, and
    ///   [`Error::TooLarge`] if an entry's rows end past the rows of the work, or if a segment is longer than
    ///   its blocks.
    /// - Returns [`Error::Overflow`] if a segment's positions overflow.
    /// - Returns [`Error::Twice`] if a row is in two entries.
    /// - Returns [`Error::NotPositive`] if the soft-cap is not above 0.
    /// - Returns [`Error::Aliased`] if an operand shares memory with the arena, or if `lse` overlaps the
    ///   queries or the output.
    /// - Returns [`Error::InvalidRope`] if unrotated keys or a segment offset need a rotary embedding and
    ///   none is given.
    /// - Returns [`Error::InvalidSelection`] if a selection is not in order.
    pub fn check(&self) -> Result<()> {
        self.arena.check_layer(self.layer)?;
        self.check_views()?;
        let shape = self.arena.layout().shape();
        let facts = self.work.facts(shape.block_size)?;
        facts.check_blocks(shape.num_blocks)?;
        self.check_positions(&facts)
    }

    fn check_views(&self) -> Result<()> {
        let s = self.arena.layout().shape();
        let (rows, heads) = (self.work.rows().len(), self.q.shape().get(1).copied().unwrap_or(0));
        for (view, dim) in [(&self.q, s.k_dim), (&self.out, s.v_dim)] {
            same("rank of queries and output [rows, heads, dim]", 3, view.shape().len())?;
            same("rows of queries and output", rows, view.shape()[0])?;
            same("heads of queries and output", heads, view.shape()[1])?;
            same("dim of queries and output", dim, view.shape()[2])?;
            computable("queries and output", view)?;
            innermost_dense("queries and output", view)?;
            self.arena.check_apart("queries and output", view)?;
        }
        writable("output", &self.out)?;
        if self.softcap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
            return Err(Error::NotPositive {
                what: "softcap",
                value: f64::from(self.softcap.unwrap_or(0.0)),
            });
        }
        if heads == 0 {
            return Err(Error::Zero { what: "query heads" });
        }
        for of in [s.k_heads, s.v_heads] {
            if !heads.is_multiple_of(of) {
                return Err(Error::NotMultiple { what: "number of query heads", value: heads, of });
            }
        }
        if let Some(lse) = &self.lse {
            same("rank of lse [rows, heads]", 2, lse.shape().len())?;
            same("rows of lse", rows, lse.shape()[0])?;
            same("heads of lse", heads, lse.shape()[1])?;
            if lse.dtype() != DType::F32 {
                return Err(Error::mismatch("lse", DType::F32, lse.dtype()));
            }
            writable("lse", lse)?;
            self.arena.check_apart("lse", lse)?;
            apart("lse and queries", lse, &self.q)?;
            apart("lse and output", lse, &self.out)?;
        }
        Ok(())
    }

    fn check_positions(&self, facts: &Facts) -> Result<()> {
        let Some(rope) = &self.rope else {
            if self.keys == KeyForm::Unrotated {
                return Err(Error::InvalidRope("unrotated keys cannot be read without one".to_owned()));
            }
            return facts.offset().map_or(Ok(()), |offset| {
                let reason = format!("a segment at offset {offset} needs queries that attend can rotate");
                Err(Error::InvalidRope(reason))
            });
        };
        check_rotary(rope, self.arena.layout().shape().k_dim)?;
        rope.table(facts.rotations(self.keys)).map(drop)
    }

    /// Returns the total size, in bytes, of the keys and values in the entries' segments in one layer,
    /// including scales that are stored per block. Each entry's segments are counted once, whatever its rows
    /// attend to.
    pub fn bytes(&self) -> usize {
        self.work.tokens() * self.arena.layout().token_bytes()
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.arena(&self.arena);
        storages.view(&self.q);
        storages.view(&self.out);
        if let Some(lse) = &self.lse {
            storages.view(lse);
        }
    }
}
