//! Divides an attention call into items, which threads take one by one.

use std::ops::Range;

use kvcore::Attend;

use super::heads::HeadUnits;
use crate::fast::share;

// Decision: docs/decisions/backend-cpu.md#the-number-of-queries-decides-how-attention-reads
/// Minimum number of queries (rows times heads) for which a tile is packed once for all queries.
pub(super) const MANY_QUERIES: usize = 16;
/// Maximum number of queries (rows times heads) per item.
pub(super) const MOST_QUERIES: usize = 256;
/// Minimum number of tokens per item if a row's tokens are split.
const FEWEST_TOKENS: usize = 256;

/// A piece of work: some heads in some rows of one entry, and all or part of the tokens that these rows
/// attend to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkItem {
    pub(super) entry: usize,
    pub(super) rows: Range<usize>,
    pub(super) units: Range<usize>,
    /// The item's part of the tokens that any of its rows attends to. Tokens are counted over all segments.
    tokens: Range<usize>,
    /// The runs that these tokens form, as a range of [`ItemPlan::runs`].
    pub(super) runs: Range<usize>,
    /// Index of the first element of the item's states in the shared buffer, if the tokens of its rows are
    /// split between items.
    pub(super) shared: Option<usize>,
}

/// Consecutive items with the same rows and heads, each with a part of these rows' tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SplitItems {
    /// Index of the first item.
    pub(super) item: usize,
    pub(super) parts: usize,
}

/// The key of a plan. All calls of a step that have the same window and extents can use the same plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ItemPlanKey {
    /// The ID of the work, [`AttendWork::id`](kvcore::AttendWork::id).
    work: u64,
    window: Option<usize>,
    units: HeadUnits,
    v_dim: usize,
    block_size: usize,
    threads: usize,
}

impl ItemPlanKey {
    pub(super) fn of(op: &Attend, units: HeadUnits, threads: usize) -> Self {
        let s = op.arena.layout().shape();
        let (v_dim, block_size) = (s.v_dim, s.block_size);
        Self { work: op.work.id(), window: op.window, units, v_dim, block_size, threads }
    }
}

/// The plans of a thread's recent calls. Their memory is reused between steps.
#[derive(Debug, Default)]
pub(super) struct ItemPlans {
    /// The most recent plans. A few plans are enough, because a model's layers differ only in their windows,
    /// if at all.
    plans: [(Option<ItemPlanKey>, ItemPlan); 4],
    /// Index of the next plan to replace.
    next: usize,
}

impl ItemPlans {
    /// Returns the plan for a key, and calls `make` to create it if there is none.
    pub(super) fn get(&mut self, key: ItemPlanKey, make: impl FnOnce(&mut ItemPlan)) -> &ItemPlan {
        let known = self.plans.iter().position(|(known, _)| *known == Some(key));
        let at = known.unwrap_or_else(|| {
            let at = self.next;
            self.next = (at + 1) % self.plans.len();
            let (of, plan) = &mut self.plans[at];
            *of = None;
            make(plan);
            *of = Some(key);
            at
        });
        &self.plans[at].1
    }
}

/// Consecutive tokens of one segment of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TokenRun {
    pub(super) segment: usize,
    pub(super) tokens: Range<usize>,
}

/// The items of a call.
#[derive(Debug, Default)]
pub(super) struct ItemPlan {
    pub(super) items: Vec<WorkItem>,
    /// The token runs of all items. See [`WorkItem::runs`].
    pub(super) runs: Vec<TokenRun>,
    pub(super) split: Vec<SplitItems>,
    /// Scratch list of the items to split.
    whole: Vec<WorkItem>,
    /// Number of elements in the shared buffer.
    pub(super) shared: usize,
    /// Estimated cost of the call, in bytes: the size of the keys and values, counted once for every four
    /// queries that use them.
    pub(super) cost: usize,
}

impl ItemPlan {
    /// Divides a call into items for `threads` threads.
    pub(super) fn make(&mut self, op: &Attend, units: HeadUnits, threads: usize) {
        self.items.clear();
        self.runs.clear();
        self.split.clear();
        (self.shared, self.cost) = (0, 0);
        let s = op.arena.layout().shape();
        let row_bytes = (s.k_dim + s.v_dim) * s.format.storage_dtype().bits() / 8;
        for (entry, rows) in op.work.batch().iter().enumerate() {
            let (count, all) = (rows.rows.len(), units.count());
            // A selection belongs to a single row. An item with many rows has a single head unit.
            let (step, heads) = if rows.selection.is_some() {
                (1, all)
            } else if count * units.size >= MANY_QUERIES {
                ((MOST_QUERIES / units.size).max(1), 1)
            } else {
                (count.max(1), all)
            };
            for start in (0..count).step_by(step) {
                let part = start..(start + step).min(count);
                let part = rows.rows.start + part.start..rows.rows.start + part.end;
                let tokens = tokens_of(op, entry, part.clone());
                let products = (part.len() * units.size).div_ceil(4);
                self.cost += tokens * all * products * row_bytes;
                for first in (0..all).step_by(heads) {
                    let (rows, tokens) = (part.clone(), 0..tokens);
                    let units = first..first + heads;
                    self.items.push(WorkItem { entry, rows, units, tokens, runs: 0..0, shared: None });
                }
            }
        }
        let wanted = if threads > 1 { 2 * threads } else { 1 };
        if self.items.len() < wanted {
            self.split_tokens(op, units, wanted.div_ceil(self.items.len().max(1)), s.v_dim + 2);
        }
        self.find_runs(op);
    }

    /// Finds the token runs of each item. Consecutive items that differ only in their heads share their runs.
    fn find_runs(&mut self, op: &Attend) {
        for at in 0..self.items.len() {
            let before = at.checked_sub(1).map(|before| &self.items[before]).filter(|before| {
                let item = &self.items[at];
                (before.entry, &before.rows, &before.tokens) == (item.entry, &item.rows, &item.tokens)
            });
            self.items[at].runs = if let Some(before) = before {
                before.runs.clone()
            } else {
                let first = self.runs.len();
                push_runs(op, &self.items[at], &mut self.runs);
                first..self.runs.len()
            };
        }
    }

    /// Splits each item's tokens into up to `parts` parts.
    fn split_tokens(&mut self, op: &Attend, units: HeadUnits, parts: usize, state: usize) {
        std::mem::swap(&mut self.items, &mut self.whole);
        for item in self.whole.drain(..) {
            let parts = parts.min(item.tokens.len() / FEWEST_TOKENS).max(1);
            if parts == 1 {
                self.items.push(item);
                continue;
            }
            self.split.push(SplitItems { item: self.items.len(), parts });
            for part in 0..parts {
                let tokens = share(item.tokens.clone(), part, parts);
                self.items.push(WorkItem { tokens, shared: Some(self.shared), ..item.clone() });
                self.shared += number_of_states(op, units, &item) * state;
            }
        }
    }
}

/// Appends the token runs of an item.
fn push_runs(op: &Attend, item: &WorkItem, runs: &mut Vec<TokenRun>) {
    let entry = &op.work.batch()[item.entry];
    let (mut before, first) = (0, runs.len());
    let mut push = |segment: usize, tokens: Range<usize>| {
        let start = tokens.start + item.tokens.start.saturating_sub(before).min(tokens.len());
        let end = tokens.start + item.tokens.end.saturating_sub(before).min(tokens.len());
        before += tokens.len();
        // Adjacent selected blocks form a single run, which is divided into whole tiles.
        match runs[first..].last_mut() {
            Some(last) if last.segment == segment && last.tokens.end == start => last.tokens.end = end,
            _ if start < end => runs.push(TokenRun { segment, tokens: start..end }),
            _ => {}
        }
    };
    if entry.selection.is_some() {
        for (segment, tokens) in op.seen(entry, item.rows.start) {
            let index = entry.segments.iter().position(|other| std::ptr::eq(other, segment));
            push(index.unwrap_or_default(), tokens);
        }
    } else {
        for (index, segment) in entry.segments.iter().enumerate() {
            push(index, union(op, segment, item.rows.clone()));
        }
    }
}

/// Returns the number of an item's states: one per merge group, head and row.
pub(super) fn number_of_states(op: &Attend, units: HeadUnits, item: &WorkItem) -> usize {
    op.work.groups().len() * item.units.len() * units.size * item.rows.len()
}

/// Returns the range from the first to the last token of a segment that any of the rows attends to.
fn union(op: &Attend, segment: &kvcore::Segment, rows: Range<usize>) -> Range<usize> {
    let mut all = 0..0;
    for row in rows {
        let one = op.visible(segment, op.work.rows()[row]);
        if !one.is_empty() {
            all = if all.is_empty() { one } else { all.start.min(one.start)..all.end.max(one.end) };
        }
    }
    all
}

/// Returns the number of an entry's tokens that any of the rows attends to.
fn tokens_of(op: &Attend, entry: usize, rows: Range<usize>) -> usize {
    let entry = &op.work.batch()[entry];
    if entry.selection.is_some() {
        return op.seen(entry, rows.start).iter().map(|(_, tokens)| tokens.len()).sum();
    }
    entry.segments.iter().map(|segment| union(op, segment, rows.clone()).len()).sum()
}
