//! The plan of an attention: for each entry the tokens of each merge group, where they lie, how their keys are rotated, and
//! which rows see them.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, AttendRows, KeyForm, Result, Rope, Segment};
use smallvec::smallvec;

use crate::bindings::types as sys;
use crate::operations::places::{Geometry, PlaneRows, RowNumbers};
use crate::operations::plans::ListKey;
use crate::operations::turn::Angles;
use crate::operators::Tensor;
use crate::stream::{Held, Upload, Work};

/// Alignment of lists that go up together.
const ALIGN: usize = 64;

/// What all layers of a step share, for one geometry of their pools.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) entries: Vec<Entry>,
    lists: Arc<Upload>,
}

/// Rows with the same segments.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) rows: Range<usize>,
    pub(super) runs: Vec<Run>,
}

/// The tokens of a merge group.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) group: usize,
    pub(super) tokens: usize,
    /// Numbers of the rows of K and V.
    pub(super) places: [RowNumbers; 2],
    /// `[1, 1, tokens]`: the factors of the tokens' logits. None if all are 1.
    pub(super) factors: Option<Tensor>,
    /// `[1, rows, tokens]`: 0 where a row sees a token, and −∞ elsewhere. None if all rows see all tokens.
    pub(super) mask: Option<Tensor>,
    turns: Option<Turns>,
}

/// How the keys of a run are rotated as they are read.
#[derive(Debug)]
struct Turns {
    /// The angles that occur, as positions.
    distinct: Vec<i64>,
    /// The number of each token's angle.
    which: Tensor,
}

/// The angles of a plan: those of the queries of each entry, and those of the keys of each run.
#[derive(Debug)]
pub(super) struct PlanAngles {
    pub(super) queries: Vec<Angles>,
    pub(super) keys: Vec<Vec<Option<Angles>>>,
}

/// Lists that go up together.
#[derive(Debug, Default)]
pub(super) struct Lists(pub(super) Vec<u8>);

impl Lists {
    /// Adds a list. Returns its place.
    pub(super) fn add<T: bytemuck::NoUninit>(&mut self, list: &[T]) -> usize {
        let at = self.0.len().next_multiple_of(ALIGN);
        self.0.resize(at, 0);
        self.0.extend_from_slice(bytemuck::cast_slice(list));
        at
    }
}

/// Tokens that a row sees, as the lists of a run have them.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    /// The block of each token, and its place there.
    pub(super) places: Vec<(usize, usize)>,
    /// The angle by which each token's key is rotated as it is read, as a position.
    pub(super) angles: Vec<i64>,
    pub(super) factors: Vec<f32>,
}

impl Tokens {
    /// Adds tokens of a segment.
    pub(super) fn add(&mut self, segment: &Segment, tokens: Range<usize>, keys: KeyForm, block_size: usize) {
        for token in tokens {
            self.places.push((segment.blocks[token / block_size].index(), token % block_size));
            // A key that was rotated as it was stored goes on from there. The query's place needs no other turn: a product
            // depends on the distance of both.
            self.angles.push(match keys {
                KeyForm::Rotated => segment.position_offset,
                KeyForm::Unrotated => segment.position(token as i64),
            });
            self.factors.push(segment.logit_scale);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

/// Returns the numbers that occur, in the order of their first use, and which of them each place has.
pub(super) fn distinct(numbers: &[i64]) -> (Vec<i64>, Vec<i32>) {
    let (mut known, mut last) = (std::collections::HashMap::new(), (i64::MIN, -1));
    let (mut distinct, mut which) = (Vec::new(), Vec::with_capacity(numbers.len()));
    for &number in numbers {
        if last.1 < 0 || last.0 != number {
            let next = distinct.len() as i32;
            last = (number, *known.entry(number).or_insert(next));
            if last.1 == next {
                distinct.push(number);
            }
        }
        which.push(last.1);
    }
    (distinct, which)
}

/// A run before its lists are on the device.
struct Draft<'a> {
    group: usize,
    /// Segments with the union of the tokens that rows see, and the numbers of the first of these tokens in the run.
    parts: Vec<(&'a Segment, Range<usize>, usize)>,
    tokens: Tokens,
}

/// The place of a list of numbers, and how many there are.
type Listed = (usize, usize);

/// Places of the lists of a run.
struct Placed {
    places: [(Listed, Option<Listed>); 2],
    factors: Option<usize>,
    mask: Option<usize>,
    turns: Option<(Vec<i64>, usize)>,
}

/// Returns the plan of an operation, made once for all layers of a step.
pub(super) fn plan(work: &mut Work<'_>, op: &Attend, k: &PlaneRows, v: &PlaneRows) -> Result<Arc<Plan>> {
    let key = key(op, 20, k, v);
    if let Some(known) = work.plans().get::<Plan>(&key) {
        work.hold(Held::Upload(Arc::clone(&known.lists)));
        return Ok(known);
    }
    let mut lists = Lists::default();
    let drafts: Vec<(&AttendRows, Vec<Draft<'_>>)> =
        op.work.batch().iter().map(|entry| (entry, drafts(op, entry))).collect();
    let mut placed = Vec::new();
    for (entry, runs) in &drafts {
        placed.extend(runs.iter().map(|run| place(&mut lists, op, entry, run, [k, v])));
    }
    let upload = work.send(&lists.0)?;
    let mut placed = placed.into_iter();
    let at = |place: usize| upload.address() + place as u64;
    let numbers = |(place, len): Listed| Tensor::dense(at(place), sys::ACL_INT32, &[len]);
    let mut entries = Vec::new();
    for (entry, runs) in drafts {
        let count = entry.rows.len();
        let runs = runs.iter().zip(placed.by_ref()).map(|(run, placed)| {
            let tokens = run.tokens.len();
            Run {
                group: run.group,
                tokens,
                places: placed
                    .places
                    .map(|(rows, scales)| RowNumbers { rows: numbers(rows), scales: scales.map(numbers) }),
                factors: placed
                    .factors
                    .map(|place| Tensor::dense(at(place), sys::ACL_FLOAT, &[1, 1, tokens])),
                mask: placed.mask.map(|place| Tensor::dense(at(place), sys::ACL_FLOAT, &[1, count, tokens])),
                turns: placed
                    .turns
                    .map(|(distinct, place)| Turns { distinct, which: numbers((place, tokens)) }),
            }
        });
        entries.push(Entry { rows: entry.rows.clone(), runs: runs.collect() });
    }
    let made = Arc::new(Plan { entries, lists: upload });
    // The id of the work says whose plan it is; the work itself is its owner's to edit.
    work.plans().keep(key, Box::new(()), &made);
    Ok(made)
}

/// Returns the key of what is made of an operation's work for one geometry.
pub(super) fn key(op: &Attend, kind: u64, k: &PlaneRows, v: &PlaneRows) -> ListKey {
    let window = op.window.map_or(0, |window| window as u64 + 1);
    let mut key: ListKey = smallvec![kind, op.work.id(), window, u64::from(op.keys == KeyForm::Rotated)];
    key.extend(k.key());
    key.extend(v.key());
    key
}

/// Gathers the tokens of an entry into a run for each merge group.
fn drafts<'a>(op: &Attend, entry: &'a AttendRows) -> Vec<Draft<'a>> {
    let mut union: Vec<Option<Range<usize>>> = vec![None; entry.segments.len()];
    for row in entry.rows.clone() {
        for (segment, tokens) in op.seen(entry, row).into_iter().filter(|(_, tokens)| !tokens.is_empty()) {
            let known = &mut union[number(entry, segment)];
            *known = Some(match known.take() {
                None => tokens,
                Some(known) => known.start.min(tokens.start)..known.end.max(tokens.end),
            });
        }
    }
    let block_size = op.arena.layout().shape().block_size;
    let mut runs: Vec<Draft<'a>> = Vec::new();
    for (segment, tokens) in entry.segments.iter().zip(union) {
        let Some(tokens) = tokens else { continue };
        let known = runs.iter().position(|run| run.group == segment.merge_group).unwrap_or(runs.len());
        if known == runs.len() {
            runs.push(Draft { group: segment.merge_group, parts: Vec::new(), tokens: Tokens::default() });
        }
        let run = &mut runs[known];
        run.parts.push((segment, tokens.clone(), run.tokens.len()));
        run.tokens.add(segment, tokens, op.keys, block_size);
    }
    runs
}

/// Returns the number of a segment of an entry.
fn number(entry: &AttendRows, segment: &Segment) -> usize {
    entry.segments.iter().position(|known| std::ptr::eq(known, segment)).unwrap_or_default()
}

/// Adds the lists of a run.
fn place(
    lists: &mut Lists,
    op: &Attend,
    entry: &AttendRows,
    run: &Draft<'_>,
    planes: [&PlaneRows; 2],
) -> Placed {
    let Tokens { places, angles, factors } = &run.tokens;
    let turned = op.rope.is_some() && (op.keys == KeyForm::Unrotated || angles.iter().any(|&a| a != 0));
    Placed {
        places: planes.map(|plane| {
            let scales = plane.scales.as_ref().map(|scales| index(lists, &scales.geometry, places));
            (index(lists, &plane.geometry, places), scales)
        }),
        factors: factors.iter().any(|&factor| factor != 1.0).then(|| lists.add(factors)),
        mask: mask(op, entry, run).map(|mask| lists.add(&mask)),
        turns: turned.then(|| {
            let (distinct, which) = distinct(angles);
            (distinct, lists.add(&which))
        }),
    }
}

fn index(lists: &mut Lists, geometry: &Geometry, tokens: &[(usize, usize)]) -> Listed {
    let index = geometry.by_head(tokens);
    (lists.add(&index), index.len())
}

/// Returns 0 where a row sees a token and −∞ elsewhere; none if all rows see all tokens.
fn mask(op: &Attend, entry: &AttendRows, run: &Draft<'_>) -> Option<Vec<f32>> {
    let tokens_of_run = run.tokens.len();
    let mut mask = vec![f32::NEG_INFINITY; entry.rows.len() * tokens_of_run];
    for (row, seen) in entry.rows.clone().zip(mask.chunks_exact_mut(tokens_of_run)) {
        for (segment, tokens) in op.seen(entry, row) {
            let part = run.parts.iter().find(|(known, ..)| std::ptr::eq(*known, segment));
            if let Some((_, union, first)) = part.filter(|_| !tokens.is_empty()) {
                let at = first + tokens.start - union.start;
                seen[at..at + tokens.len()].fill(0.0);
            }
        }
    }
    mask.iter().any(|&x| x != 0.0).then_some(mask)
}

/// Returns the factor on cosines and sines of keys that are rotated as they are read: that of the embedding where the key was
/// not rotated before.
pub(super) fn key_factor(rope: &Rope, keys: KeyForm) -> f32 {
    match keys {
        KeyForm::Rotated => 1.0,
        KeyForm::Unrotated => rope.attention_factor(),
    }
}

impl PlanAngles {
    /// Returns the angles of a plan, made once for all layers that share a rotary embedding.
    pub(super) fn of(work: &mut Work<'_>, plan: &Plan, rope: &Arc<Rope>, op: &Attend) -> Result<Arc<Self>> {
        let window = op.window.map_or(0, |window| window as u64 + 1);
        let turned = u64::from(op.keys == KeyForm::Rotated);
        let key: ListKey = smallvec![21, op.work.id(), window, turned, Arc::as_ptr(rope) as u64];
        let made = match work.plans().get::<Self>(&key) {
            Some(known) => known,
            None => Self::make(work, plan, rope, op, key)?,
        };
        let keys = made.keys.iter().flatten().flatten();
        made.queries.iter().chain(keys).for_each(|angles| angles.hold(work));
        Ok(made)
    }

    fn make(
        work: &mut Work<'_>,
        plan: &Plan,
        rope: &Arc<Rope>,
        op: &Attend,
        key: ListKey,
    ) -> Result<Arc<Self>> {
        let (mut queries, mut keys) = (Vec::new(), Vec::new());
        for entry in &plan.entries {
            let rows = op.work.rows()[entry.rows.clone()].iter();
            let positions: Vec<i64> = rows.map(|row| row.position).collect();
            queries.push(Angles::send(work, rope, &positions, rope.attention_factor())?);
            let of_run = |run: &Run| {
                let send =
                    |turns: &Turns| Angles::send(work, rope, &turns.distinct, key_factor(rope, op.keys));
                run.turns.as_ref().map(send).transpose()
            };
            keys.push(entry.runs.iter().map(of_run).collect::<Result<_>>()?);
        }
        let made = Arc::new(Self { queries, keys });
        work.plans().keep(key, Box::new(Arc::clone(rope)), &made);
        Ok(made)
    }
}

impl Run {
    /// Rotates the keys of the run, `[heads, tokens, dim]` in f32, as they are read.
    pub(super) fn turn(&self, work: &mut Work<'_>, k: &Tensor, angles: Option<&Angles>) -> Result<()> {
        let (Some(turns), Some(angles)) = (&self.turns, angles) else { return Ok(()) };
        if turns.distinct.len() == 1 {
            return angles.turn(work, k, &[1, 1]);
        }
        angles.spread(work, &turns.which)?.turn(work, k, &[1, self.tokens])
    }
}

impl Entry {
    /// Returns the tokens of the longest run.
    pub(super) fn longest(&self) -> usize {
        self.runs.iter().map(|run| run.tokens).max().unwrap_or(0)
    }
}
