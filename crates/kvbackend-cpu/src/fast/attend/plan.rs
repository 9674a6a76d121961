//! Who computes what: parts of a call that threads take one by one.

use std::ops::Range;

use kvcore::Attend;

/// Query rows times heads from which on a tile is packed once for all of them.
pub(super) const MANY: usize = 16;
/// Query rows times heads of one part.
const BLOCK: usize = 256;
/// Fewest tokens of a part, if tokens are divided at all.
const FEWEST_TOKENS: usize = 256;

/// Heads in runs that share their K and their V head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Units {
    /// Query heads.
    pub(super) heads: usize,
    /// Heads of a run.
    pub(super) size: usize,
}

impl Units {
    pub(super) fn new(heads: usize, k_heads: usize, v_heads: usize) -> Self {
        let (mut a, mut b) = (heads / k_heads, heads / v_heads);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Self { heads, size: a.max(1) }
    }

    pub(super) fn count(self) -> usize {
        self.heads / self.size
    }

    /// The heads of a run.
    pub(super) fn heads_of(self, unit: usize) -> Range<usize> {
        unit * self.size..(unit + 1) * self.size
    }
}

/// Rows of one entry with some heads, over a part of the tokens they see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) entry: usize,
    pub(super) rows: Range<usize>,
    pub(super) units: Range<usize>,
    /// Which of the tokens that any of the rows sees, counted over all segments.
    pub(super) tokens: Range<usize>,
    /// Where its states go, if others have more tokens of the same rows: elements of the shared buffer.
    pub(super) shared: Option<usize>,
}

/// Items that have the tokens of the same rows and heads between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Divided {
    /// The first of them.
    pub(super) item: usize,
    pub(super) parts: usize,
}

/// The parts of a call.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) items: Vec<Item>,
    pub(super) divided: Vec<Divided>,
    /// Items that are being divided; memory that is kept.
    whole: Vec<Item>,
    /// Elements of the shared buffer.
    pub(super) shared: usize,
    /// Products of a query with a key or a weight with a value, counted in bytes of the cache.
    pub(super) cost: usize,
}

impl Plan {
    /// Cuts a call into parts for `threads` threads.
    pub(super) fn make(&mut self, op: &Attend, units: Units, threads: usize) {
        self.items.clear();
        self.divided.clear();
        (self.shared, self.cost) = (0, 0);
        let s = op.arena.layout().shape();
        let row_bytes = (s.k_dim + s.v_dim) * s.format.storage_dtype().bits() / 8;
        for (entry, rows) in op.batch.iter().enumerate() {
            let (count, all) = (rows.rows.len(), units.count());
            // A selection is a row's own. Many rows take the heads one by one.
            let (step, heads) = if rows.selection.is_some() {
                (1, all)
            } else if count * units.size >= MANY {
                ((BLOCK / units.size).max(1), 1)
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
                    self.items.push(Item { entry, rows, units: first..first + heads, tokens, shared: None });
                }
            }
        }
        let wanted = if threads > 1 { 4 * threads } else { 1 };
        if self.items.len() < wanted {
            self.divide(op, units, wanted.div_ceil(self.items.len().max(1)), s.v_dim + 2);
        }
    }

    /// Divides the tokens of each item into up to `parts` parts.
    fn divide(&mut self, op: &Attend, units: Units, parts: usize, state: usize) {
        std::mem::swap(&mut self.items, &mut self.whole);
        for item in self.whole.drain(..) {
            let parts = parts.min(item.tokens.len() / FEWEST_TOKENS).max(1);
            if parts == 1 {
                self.items.push(item);
                continue;
            }
            self.divided.push(Divided { item: self.items.len(), parts });
            for part in 0..parts {
                let tokens = super::super::share(item.tokens.clone(), part, parts);
                self.items.push(Item { tokens, shared: Some(self.shared), ..item.clone() });
                self.shared += states(op, units, &item) * state;
            }
        }
    }
}

/// States of an item: one per merge group, head and row.
pub(super) fn states(op: &Attend, units: Units, item: &Item) -> usize {
    op.groups.len() * item.units.len() * units.size * item.rows.len()
}

/// Tokens of a segment that any of the rows sees.
pub(super) fn union(op: &Attend, segment: &kvcore::Segment, rows: Range<usize>) -> Range<usize> {
    let mut all = 0..0;
    for row in rows {
        let one = op.visible(segment, op.rows[row]);
        if !one.is_empty() {
            all = if all.is_empty() { one } else { all.start.min(one.start)..all.end.max(one.end) };
        }
    }
    all
}

/// Tokens that any of the rows sees.
fn tokens_of(op: &Attend, entry: usize, rows: Range<usize>) -> usize {
    let entry = &op.batch[entry];
    if entry.selection.is_some() {
        return op.seen(entry, rows.start).iter().map(|(_, tokens)| tokens.len()).sum();
    }
    entry.segments.iter().map(|segment| union(op, segment, rows.clone()).len()).sum()
}
