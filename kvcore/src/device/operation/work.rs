//! The part of an attention call that is the same for all layers of a step.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::{MergeGroup, Segment, Selection};
use crate::base::{Error, KeyForm, Result};

/// The logical index and the position of a query row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryRow {
    /// Logical index of the row. The row attends to tokens with this logical index or a smaller one.
    pub logical: usize,
    /// Position that the query is rotated to.
    pub position: i64,
}

/// Rows that attend to the same segments, usually the rows of one sequence in a batch.
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
    /// Range of rows in `q` and `out`.
    pub rows: Range<usize>,
    /// Segments that the rows attend to. The segments include the rows' own tokens, which must be scattered
    /// first.
    pub segments: Arc<[Segment]>,
    /// Tokens that each row may attend to, or `None` for all tokens.
    pub selection: Option<Selection>,
}

impl AttendRows {
    /// Creates an entry whose rows attend to all tokens of `segments` that causality and the window allow.
    pub fn new(rows: Range<usize>, segments: impl Into<Arc<[Segment]>>) -> Self {
        Self { rows, segments: segments.into(), selection: None }
    }

    /// Returns the number of tokens in all segments but the last, which contains the rows' own tokens.
    pub fn tokens_before(&self) -> usize {
        let before = &self.segments[..self.segments.len().saturating_sub(1)];
        before.iter().map(|segment| segment.len).sum()
    }

    /// Limits the rows to the tokens in `selection`.
    #[must_use]
    pub fn selecting(mut self, selection: Selection) -> Self {
        self.selection = Some(selection);
        self
    }
}

// Decision: docs/decisions/device.md#the-work-of-a-step-is-prepared-once
/// The work of one attention step: query rows, the segments that each row attends to, and merge groups.
///
/// All layers of a step share one `AttendWork`, which is checked only once. A backend stores the data that it
/// derives from the work (a plan, uploaded block tables) under [`id`](Self::id) for the following layers. The
/// next step needs a new `AttendWork`, or this one [edited](Self::edit) in place.
///
/// ```
/// use kvcore::{AttendRows, AttendWork, BlockId, QueryRow, Segment};
///
/// let own = Segment::new([BlockId(4)].into(), 11, 0, 0);
/// let rows = [QueryRow { logical: 10, position: 10 }];
/// let mut work = AttendWork::new(rows, [AttendRows::new(0..1, [own])]);
/// let first = work.id();
/// work.edit(|rows, batch| {                       // the next token of the same sequence
///     rows[0] = QueryRow { logical: 11, position: 11 };
///     batch[0].segments = [Segment { len: 12, ..batch[0].segments[0].clone() }].into();
/// });
/// assert_ne!(work.id(), first);
/// ```
#[derive(Debug)]
pub struct AttendWork {
    id: u64,
    rows: Vec<QueryRow>,
    batch: Vec<AttendRows>,
    groups: Arc<[MergeGroup]>,
    /// The result of the first check.
    facts: OnceLock<Facts>,
}

/// The requirements of the work, which each layer compares with its own arena and rotary embedding.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    /// The block size with which segments and selections were checked.
    block_size: usize,
    /// The largest block index plus 1.
    blocks: usize,
    /// A nonzero segment offset, if there is one.
    offset: Option<i64>,
    /// The smallest and the largest query position.
    queries: Option<(i64, i64)>,
    /// The smallest and the largest difference between a query position and a segment offset.
    turned: Option<(i64, i64)>,
    /// The smallest and the largest position at which cached tokens are used.
    keys: Option<(i64, i64)>,
}

// Decision: docs/decisions/device.md#backends-find-their-plans-by-the-works-id
/// The ID of the next [`AttendWork`]. IDs are never reused.
static IDS: AtomicU64 = AtomicU64::new(1);

impl AttendWork {
    /// Creates work with plain softmax semantics: one merge group with factor 1.
    pub fn new(rows: impl Into<Vec<QueryRow>>, batch: impl Into<Vec<AttendRows>>) -> Self {
        Self::with_groups(rows, batch, [MergeGroup::default()])
    }

    /// Creates work with merge groups. [`Segment::merge_group`] is an index into them.
    pub fn with_groups(
        rows: impl Into<Vec<QueryRow>>,
        batch: impl Into<Vec<AttendRows>>,
        groups: impl Into<Arc<[MergeGroup]>>,
    ) -> Self {
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            rows: rows.into(),
            batch: batch.into(),
            groups: groups.into(),
            facts: OnceLock::new(),
        }
    }

    /// Returns the ID of this work. Each edit changes the ID.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the query rows, one for each row of the query tensor.
    pub fn rows(&self) -> &[QueryRow] {
        &self.rows
    }

    /// Returns the entries, each with its rows and segments. Output rows that are in no entry are left
    /// unchanged.
    pub fn batch(&self) -> &[AttendRows] {
        &self.batch
    }

    /// Returns the merge groups that segments refer to.
    pub fn groups(&self) -> &Arc<[MergeGroup]> {
        &self.groups
    }

    /// Returns the total number of tokens in the entries' segments. Each entry's segments are counted once.
    pub fn tokens(&self) -> usize {
        self.batch.iter().flat_map(|entry| entry.segments.iter()).map(|segment| segment.len).sum()
    }

    /// Calls `change` to edit the rows and entries in place, reusing their memory. Gives the work a new ID.
    pub fn edit(&mut self, change: impl FnOnce(&mut Vec<QueryRow>, &mut Vec<AttendRows>)) {
        self.id = IDS.fetch_add(1, Ordering::Relaxed);
        self.facts = OnceLock::new();
        change(&mut self.rows, &mut self.batch);
    }

    /// Checks rows, segments and selections with blocks of `block_size` tokens. Later calls with the same
    /// block size return the result of the first check.
    pub(super) fn facts(&self, block_size: usize) -> Result<Facts> {
        match self.facts.get() {
            Some(facts) if facts.block_size == block_size => Ok(*facts),
            _ => {
                let facts = self.find_facts(block_size)?;
                // A second block size is rare, so its check is not stored but repeated in each layer.
                self.facts.get_or_init(|| facts);
                Ok(facts)
            }
        }
    }

    fn find_facts(&self, block_size: usize) -> Result<Facts> {
        let mut facts =
            Facts { block_size, blocks: 0, offset: None, queries: None, turned: None, keys: None };
        for entry in &self.batch {
            let Some(rows) = self.rows.get(entry.rows.clone()) else {
                let end = entry.rows.end.max(entry.rows.start);
                return Err(Error::too_large("end of the rows", end, self.rows.len()));
            };
            let positions = rows.iter().map(|row| row.position);
            let span = positions.clone().min().zip(positions.max());
            if let Some((low, high)) = span {
                widen(&mut facts.queries, [low, high]);
            }
            for segment in entry.segments.iter() {
                self.check_segment(segment, block_size)?;
                let end = segment.blocks.iter().map(|block| block.index() + 1).max();
                facts.blocks = facts.blocks.max(end.unwrap_or(0));
                if segment.position_offset != 0 {
                    facts.offset.get_or_insert(segment.position_offset);
                }
                if let Some((low, high)) = span.filter(|_| segment.len > 0) {
                    let turned = [low, high].map(|at| at.saturating_sub(segment.position_offset));
                    widen(&mut facts.turned, turned);
                    widen(&mut facts.keys, [0, segment.len as i64 - 1].map(|token| segment.position(token)));
                }
            }
            if let Some(selection) = &entry.selection {
                selection.check(entry.rows.len(), &entry.segments, block_size)?;
            }
        }
        self.check_rows_apart()?;
        Ok(facts)
    }

    fn check_segment(&self, segment: &Segment, block_size: usize) -> Result<()> {
        let capacity = segment.blocks.len() * block_size;
        if segment.len > capacity {
            return Err(Error::too_large("length of a segment", segment.len, capacity));
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
        Ok(())
    }

    /// Checks that no row is in two entries.
    fn check_rows_apart(&self) -> Result<()> {
        let mut end = 0;
        for rows in self.batch.iter().map(|entry| &entry.rows).filter(|rows| !rows.is_empty()) {
            if rows.start < end {
                // The rows overlap, or they are out of order and must be sorted first.
                let mut claimed: Vec<_> = self.batch.iter().map(|entry| entry.rows.clone()).collect();
                claimed.retain(|rows| !rows.is_empty());
                claimed.sort_by_key(|rows| rows.start);
                let both = claimed.windows(2).find(|pair| pair[0].end > pair[1].start);
                return both
                    .map_or(Ok(()), |pair| Err(Error::Twice { what: "row", number: pair[1].start as u64 }));
            }
            end = rows.end;
        }
        Ok(())
    }
}

impl Facts {
    /// Checks that all blocks are inside an arena of `limit` blocks.
    pub(super) fn check_blocks(&self, limit: usize) -> Result<()> {
        match self.blocks.checked_sub(1) {
            Some(block) if block >= limit => Err(Error::range("block", block, limit)),
            _ => Ok(()),
        }
    }

    /// Returns a nonzero segment offset, if there is one.
    pub(super) fn offset(&self) -> Option<i64> {
        self.offset
    }

    /// Returns the smallest and the largest position that queries and keys are rotated to.
    pub(super) fn rotations(&self, keys: KeyForm) -> impl Iterator<Item = i64> {
        let moved = match keys {
            KeyForm::Rotated => self.turned,
            KeyForm::Unrotated => self.keys,
        };
        [self.queries, moved].into_iter().flatten().flat_map(|(low, high)| [low, high])
    }
}

fn widen(span: &mut Option<(i64, i64)>, with: [i64; 2]) {
    let (low, high) = span.unwrap_or((with[0], with[0]));
    *span = Some((low.min(with[0]).min(with[1]), high.max(with[0]).max(with[1])));
}
