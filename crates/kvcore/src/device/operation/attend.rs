//! Grouped-query attention over segments.
//!
//! A *segment* is a run of cached tokens together with where they stand: in the prompt's logical
//! order, and in position space relative to where their keys were rotated. Several requests may use
//! the same physical blocks in segments with different offsets at the same time; no key moves, the
//! query is rotated once per distinct offset instead.

use std::ops::Range;
use std::sync::Arc;

use super::entry::Storages;
use super::{Selection, apart, computable, innermost_dense, writable};
use crate::base::{BlockId, DType, Error, KeyForm, Result, Rope, same};
use crate::device::{KvArena, TensorView};

/// A run of cached tokens as one request uses it.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// Blocks in order; token `j` lies in `blocks[j / block_size]`.
    pub blocks: Arc<[BlockId]>,
    /// Tokens of the run, at most `blocks.len() * block_size`.
    pub len: usize,
    /// Logical index of the first token. Causality goes by logical index, never by position.
    pub logical_start: usize,
    /// Position at which the first key was rotated when it was stored.
    pub stored_start: i64,
    /// Positions from where the keys were stored to where they are used.
    pub position_offset: i64,
    /// Multiplies the segment's logits (an inverse temperature); 1 for plain attention.
    pub logit_scale: f32,
    /// Index into [`Attend::groups`].
    pub merge_group: usize,
}

impl Segment {
    /// A segment with plain softmax semantics, used where it was stored.
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

    /// Where the key of token `token` is used.
    pub fn position(&self, token: i64) -> i64 {
        self.stored_start.saturating_add(self.position_offset).saturating_add(token)
    }

    /// The same tokens used `offset` positions further on.
    #[must_use]
    pub fn at_offset(mut self, offset: i64) -> Self {
        self.position_offset = offset;
        self
    }
}

/// Segments that are merged with each other first.
///
/// The group's log-sum-exp is multiplied by `lse_scale` before the groups are merged: with a
/// temperature in [`Segment::logit_scale`] this is the context scaling of APE (Yang et al., 2025).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergeGroup {
    /// Factor on the group's log-sum-exp; 1 for plain attention.
    pub lse_scale: f32,
}

impl Default for MergeGroup {
    fn default() -> Self {
        Self { lse_scale: 1.0 }
    }
}

/// Where a query row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryRow {
    /// Logical index; the row sees tokens whose logical index is not larger.
    pub logical: usize,
    /// Position that the query is rotated to.
    pub position: i64,
}

/// Rows that attend to the same segments: one sequence of a batch.
///
/// ```
/// use kvcore::{AttendRows, BlockId, Segment, Selection, SelectionUnit};
/// // two rows over 40 tokens in blocks of 16; the first sees blocks 0 and 2, the second block 2 alone
/// let segment = Segment::new([BlockId(7), BlockId(3), BlockId(5)].into(), 40, 0, 0);
/// let unit = SelectionUnit::Blocks;
/// let selection = Selection { unit, offsets: [0, 2, 3].into(), indices: [0, 2, 2].into() };
/// let entry = AttendRows::new(0..2, [segment]).selecting(selection);
/// assert_eq!(entry.selection.as_ref().map(|s| s.row(1)), Some(&[2][..]));
/// ```
#[derive(Debug, Clone)]
pub struct AttendRows {
    /// Rows of `q` and `out`.
    pub rows: Range<usize>,
    /// What they see. The tokens of the rows themselves are in it, scattered before.
    pub segments: Arc<[Segment]>,
    /// Which of these tokens each row may see; all of them without it.
    pub selection: Option<Selection>,
}

impl AttendRows {
    /// Rows that see all tokens of `segments`, as far as causality and window allow.
    pub fn new(rows: Range<usize>, segments: impl Into<Arc<[Segment]>>) -> Self {
        Self { rows, segments: segments.into(), selection: None }
    }

    /// The same rows limited to a selection.
    #[must_use]
    pub fn selecting(mut self, selection: Selection) -> Self {
        self.selection = Some(selection);
        self
    }
}

/// Attention of any mix of prefill and decode rows in one call.
///
/// For each row and head: `softmax(scale * logit_scale * q·k) v` over the tokens of its segments
/// whose logical index is at most the row's, whose position lies inside the window, and that are
/// selected if the entry has a [`Selection`]. Query head `h`
/// of `heads` reads head `h * k_heads / heads` of K and `h * v_heads / heads` of V. A row that sees
/// nothing gives zeros and a log-sum-exp of −∞.
#[derive(Debug, Clone)]
pub struct Attend {
    /// Keys and values.
    pub arena: KvArena,
    /// Layer read.
    pub layer: usize,
    /// Queries `[rows, heads, k_dim]`, *not* rotated if `rope` is given.
    pub q: TensorView,
    /// Rotates each query by its position minus the segment's offset. Without it queries come
    /// rotated and every offset must be 0.
    pub rope: Option<Arc<Rope>>,
    /// How the arena's keys lie there. Unrotated ones are rotated as they are read, token `j` of a segment
    /// to `stored_start + position_offset + j` with the attention factor, and queries to their own
    /// position; `rope` must be given then.
    pub keys: KeyForm,
    /// One entry per row of `q`.
    pub rows: Arc<[QueryRow]>,
    /// Which rows see which segments; rows in no entry are left alone.
    pub batch: Arc<[AttendRows]>,
    /// Merge groups that segments refer to.
    pub groups: Arc<[MergeGroup]>,
    /// Softmax scale, usually `1 / sqrt(k_dim)`.
    pub scale: f32,
    /// Sliding window: a token is seen if `query position − key position < window`.
    pub window: Option<usize>,
    /// Soft-cap `c`: logits become `c * tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// Output `[rows, heads, v_dim]`.
    pub out: TensorView,
    /// Log-sum-exp of each row and head `[rows, heads]`, f32; apart from all other operands.
    pub lse: Option<TensorView>,
}

impl Attend {
    /// Tokens of a segment that a row could see: up to its own place in logical order, and from the first that is
    /// inside the window.
    pub fn visible(&self, segment: &Segment, row: QueryRow) -> Range<usize> {
        let end = row.logical.saturating_add(1).saturating_sub(segment.logical_start).min(segment.len);
        let Some(window) = self.window else { return 0..end };
        let distance =
            i128::from(row.position) - i128::from(segment.stored_start) - i128::from(segment.position_offset);
        let start = (distance - window as i128 + 1).clamp(0, end as i128);
        start as usize..end
    }

    /// Runs of tokens that row `row` of an entry sees, in order: those visible, and selected if the entry has a
    /// selection. Runs may be empty.
    pub fn seen<'a>(&self, entry: &'a AttendRows, row: usize) -> Vec<(&'a Segment, Range<usize>)> {
        let at = self.rows[row];
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

    /// Checks shapes, segments and positions, and grows the table.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for extents that do not fit, [`Error::DTypeMismatch`], [`Error::OutOfRange`],
    /// [`Error::Overflow`]; [`Error::Aliased`] when `out` or `lse` has two elements at one address, when an
    /// operand lies in the arena, or when `lse` reaches into queries or output; [`Error::InvalidRope`] and
    /// [`Error::InvalidSelection`].
    pub fn check(&self) -> Result<()> {
        self.arena.check_layer(self.layer)?;
        self.check_views()?;
        for entry in self.batch.iter() {
            if entry.rows.start > entry.rows.end || entry.rows.end > self.rows.len() {
                return Err(Error::range("end of the rows", entry.rows.end, self.rows.len() + 1));
            }
            for segment in entry.segments.iter() {
                self.check_segment(segment)?;
            }
            if let Some(selection) = &entry.selection {
                let block_size = self.arena.layout().shape().block_size;
                selection.check(entry.rows.len(), &entry.segments, block_size)?;
            }
        }
        self.check_rows_apart()?;
        self.check_positions()
    }

    /// No row is in two entries.
    fn check_rows_apart(&self) -> Result<()> {
        let twice = |row: usize| {
            Err(Error::InvalidStrides { what: "batch", reason: format!("row {row} is in two entries") })
        };
        let mut end = 0;
        for rows in self.batch.iter().map(|entry| &entry.rows).filter(|rows| !rows.is_empty()) {
            if rows.start < end {
                // Not in order, so that they must be sorted first, or not apart.
                let mut claimed: Vec<_> = self.batch.iter().map(|entry| entry.rows.clone()).collect();
                claimed.retain(|rows| !rows.is_empty());
                claimed.sort_by_key(|rows| rows.start);
                let both = claimed.windows(2).find(|pair| pair[0].end > pair[1].start);
                return both.map_or(Ok(()), |pair| twice(pair[1].start));
            }
            end = rows.end;
        }
        Ok(())
    }

    fn check_views(&self) -> Result<()> {
        let s = self.arena.layout().shape();
        let (rows, heads) = (self.rows.len(), self.q.shape().get(1).copied().unwrap_or(0));
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
            return Err(Error::Zero { what: "softcap" });
        }
        for (what, kv_heads) in [
            ("query heads as a multiple of k_heads", s.k_heads),
            ("query heads as a multiple of v_heads", s.v_heads),
        ] {
            if heads == 0 || !heads.is_multiple_of(kv_heads) {
                return Err(Error::Mismatch { what, expected: kv_heads, got: heads });
            }
        }
        if let Some(lse) = &self.lse {
            same("rank of lse [rows, heads]", 2, lse.shape().len())?;
            same("rows of lse", rows, lse.shape()[0])?;
            same("heads of lse", heads, lse.shape()[1])?;
            if lse.dtype() != DType::F32 {
                return Err(Error::DTypeMismatch { what: "lse", expected: DType::F32, got: lse.dtype() });
            }
            writable("lse", lse)?;
            self.arena.check_apart("lse", lse)?;
            apart("lse and queries", lse, &self.q)?;
            apart("lse and output", lse, &self.out)?;
        }
        Ok(())
    }

    fn check_segment(&self, segment: &Segment) -> Result<()> {
        let capacity = segment.blocks.len() * self.arena.layout().shape().block_size;
        if segment.len > capacity {
            return Err(Error::range("length of a segment", segment.len, capacity + 1));
        }
        let last_position = segment
            .stored_start
            .checked_add(segment.position_offset)
            .and_then(|start| start.checked_add(segment.len as i64));
        if last_position.is_none() || segment.logical_start.checked_add(segment.len).is_none() {
            return Err(Error::Overflow { what: "positions of a segment" });
        }
        if segment.merge_group >= self.groups.len() {
            return Err(Error::range("merge group", segment.merge_group, self.groups.len()));
        }
        if self.rope.is_none() && segment.position_offset != 0 {
            return Err(Error::InvalidRope(format!(
                "a segment at offset {} needs queries that attend can rotate",
                segment.position_offset
            )));
        }
        segment.blocks.iter().try_for_each(|&block| self.arena.check_block(block))
    }

    fn check_positions(&self) -> Result<()> {
        let Some(rope) = &self.rope else {
            return match self.keys {
                KeyForm::Rotated => Ok(()),
                KeyForm::Unrotated => {
                    Err(Error::InvalidRope("unrotated keys need one to be read".to_owned()))
                }
            };
        };
        let (rotary, dim) = (rope.config().rotary_dim, self.arena.layout().shape().k_dim);
        if rotary > dim {
            return Err(Error::range("rotary_dim", rotary, dim + 1));
        }
        for entry in self.batch.iter() {
            let positions = self.rows[entry.rows.clone()].iter().map(|row| row.position);
            let (Some(low), Some(high)) = (positions.clone().min(), positions.max()) else { continue };
            rope.table([low, high])?;
            for segment in entry.segments.iter().filter(|segment| segment.len > 0) {
                let turns = match self.keys {
                    KeyForm::Rotated => [low, high].map(|at| at.saturating_sub(segment.position_offset)),
                    KeyForm::Unrotated => [0, segment.len as i64 - 1].map(|token| segment.position(token)),
                };
                rope.table(turns)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of the cached keys and values, with their scales, that the entries have in sight: each
    /// entry's segments once.
    pub fn bytes(&self) -> usize {
        let tokens: usize = self.batch.iter().flat_map(|entry| entry.segments.iter()).map(|s| s.len).sum();
        tokens * self.arena.layout().token_bytes()
    }

    /// Names the memory that the operation touches.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.arena(&self.arena);
        storages.view(&self.q);
        storages.view(&self.out);
        if let Some(lse) = &self.lse {
            storages.view(lse);
        }
    }
}
