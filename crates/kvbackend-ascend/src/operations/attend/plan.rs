//! Plans of attention: for each entry, runs of tokens whose keys take the same rotation of the query.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, AttendRows, KeyForm, Result, Rope, Segment};
use smallvec::smallvec;

use crate::bindings::types as sys;
use crate::operations::places::{Geometry, PlaneRows};
use crate::operations::plans::{ListKey, Sent};
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

/// Tokens that are scored with one rotation of the query and one factor, in one merge group.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) group: usize,
    pub(super) logit_scale: f32,
    /// Distance from the stored keys to their place of use; 0 where keys are rotated as they are read.
    offset: i64,
    /// Positions of the tokens, where keys are rotated as they are read.
    positions: Vec<i64>,
    pub(super) tokens: usize,
    /// Numbers of the rows of K and V, and whether they are in the order of heads.
    pub(super) places: [(Tensor, bool); 2],
    /// `[rows, tokens]`: 0 where a row sees a token, and −∞ elsewhere. None if all rows see all tokens.
    pub(super) mask: Option<Tensor>,
}

/// The angles of a plan: those of the queries of each run or of each entry, and those of the keys of each run.
#[derive(Debug)]
pub(super) struct PlanAngles {
    pub(super) queries: Vec<Vec<Angles>>,
    pub(super) keys: Vec<Vec<Angles>>,
}

/// Lists that go up together.
#[derive(Default)]
struct Lists(Vec<u8>);

impl Lists {
    /// Adds a list. Returns its place.
    fn add<T: bytemuck::NoUninit>(&mut self, list: &[T]) -> usize {
        let at = self.0.len().next_multiple_of(ALIGN);
        self.0.resize(at, 0);
        self.0.extend_from_slice(bytemuck::cast_slice(list));
        at
    }
}

/// A run before its lists are on the device.
struct Draft<'a> {
    key: (usize, i64, u32),
    /// Segments with the union of the tokens that rows see, and the numbers of the first of these tokens in the run.
    parts: Vec<(&'a Segment, Range<usize>, usize)>,
    tokens: usize,
}

/// Returns the plan of an operation, made once for all layers of a step.
pub(super) fn plan(work: &mut Work<'_>, op: &Attend, k: &PlaneRows, v: &PlaneRows) -> Result<Arc<Plan>> {
    let window = op.window.map_or(0, |window| window as u64 + 1);
    let mut key: ListKey = smallvec![20, op.work.id(), window, u64::from(op.keys == KeyForm::Rotated)];
    key.extend(k.geometry.key());
    key.extend(v.geometry.key());
    if let Some(known) = work.plans().get::<Plan>(&key) {
        work.hold(Held::Upload(Arc::clone(&known.lists)));
        return Ok(known);
    }
    let mut lists = Lists::default();
    let drafts: Vec<(&AttendRows, Vec<Draft<'_>>)> =
        op.work.batch().iter().map(|entry| (entry, drafts(op, entry))).collect();
    let mut placed = Vec::new();
    for (entry, runs) in &drafts {
        for run in runs {
            let tokens = run.blocks(op.arena.layout().shape().block_size);
            let places = [k, v].map(|plane| index(&mut lists, &plane.geometry, &tokens));
            placed.push((places, mask(op, entry, run).map(|mask| lists.add(&mask))));
        }
    }
    let upload = work.send(&lists.0)?;
    let mut placed = placed.into_iter();
    let mut entries = Vec::new();
    for (entry, runs) in drafts {
        let count = entry.rows.len();
        let runs = runs.iter().zip(placed.by_ref()).map(|(run, (places, mask))| {
            let at = |place: usize| upload.address() + place as u64;
            let rotated = op.keys == KeyForm::Rotated;
            let positions = || {
                let parts = run.parts.iter();
                parts.flat_map(|(segment, tokens, _)| {
                    tokens.clone().map(|token| segment.position(token as i64))
                })
            };
            Run {
                group: run.key.0,
                offset: run.key.1,
                logit_scale: f32::from_bits(run.key.2),
                positions: if rotated { Vec::new() } else { positions().collect() },
                tokens: run.tokens,
                places: places
                    .map(|(place, len, by_head)| (Tensor::dense(at(place), sys::ACL_INT32, &[len]), by_head)),
                mask: mask.map(|place| Tensor::dense(at(place), sys::ACL_FLOAT, &[1, count, run.tokens])),
            }
        });
        entries.push(Entry { rows: entry.rows.clone(), runs: runs.collect() });
    }
    let made = Arc::new(Plan { entries, lists: upload });
    // The id of the work says whose plan it is; the work itself is its owner's to edit.
    work.plans().keep(key, Box::new(()), &made);
    Ok(made)
}

/// Cuts the segments of an entry into runs.
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
    let mut runs: Vec<Draft<'a>> = Vec::new();
    for (segment, tokens) in entry.segments.iter().zip(union) {
        let Some(tokens) = tokens else { continue };
        let offset = if op.keys == KeyForm::Rotated { segment.position_offset } else { 0 };
        let key = (segment.merge_group, offset, segment.logit_scale.to_bits());
        let known = runs.iter().position(|run| run.key == key).unwrap_or(runs.len());
        if known == runs.len() {
            runs.push(Draft { key, parts: Vec::new(), tokens: 0 });
        }
        let run = &mut runs[known];
        let (first, count) = (run.tokens, tokens.len());
        run.parts.push((segment, tokens, first));
        run.tokens += count;
    }
    runs
}

/// Returns the number of a segment of an entry.
fn number(entry: &AttendRows, segment: &Segment) -> usize {
    entry.segments.iter().position(|known| std::ptr::eq(known, segment)).unwrap_or_default()
}

impl Draft<'_> {
    /// Returns the blocks of the tokens, and their places in them.
    fn blocks(&self, block_size: usize) -> Vec<(usize, usize)> {
        let of = |(segment, tokens, _): &(&Segment, Range<usize>, usize)| {
            let blocks = Arc::clone(&segment.blocks);
            tokens.clone().map(move |token| (blocks[token / block_size].index(), token % block_size))
        };
        self.parts.iter().flat_map(of).collect()
    }
}

fn index(lists: &mut Lists, geometry: &Geometry, tokens: &[(usize, usize)]) -> (usize, usize, bool) {
    let (index, by_head) = geometry.by_head(tokens);
    (lists.add(&index), index.len(), by_head)
}

/// Returns 0 where a row sees a token and −∞ elsewhere; none if all rows see all tokens.
fn mask(op: &Attend, entry: &AttendRows, run: &Draft<'_>) -> Option<Vec<f32>> {
    let mut mask = vec![f32::NEG_INFINITY; entry.rows.len() * run.tokens];
    for (row, seen) in entry.rows.clone().zip(mask.chunks_exact_mut(run.tokens)) {
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
        made.queries.iter().chain(&made.keys).flatten().for_each(|angles| angles.hold(work));
        Ok(made)
    }

    fn make(
        work: &mut Work<'_>,
        plan: &Plan,
        rope: &Arc<Rope>,
        op: &Attend,
        key: ListKey,
    ) -> Result<Arc<Self>> {
        let factor = rope.attention_factor();
        let (mut queries, mut keys) = (Vec::new(), Vec::new());
        for entry in &plan.entries {
            let (mut of_queries, mut of_keys) = (Vec::new(), Vec::new());
            for run in &entry.runs {
                let rows = op.work.rows()[entry.rows.clone()].iter();
                let positions: Vec<i64> = rows.map(|row| row.position.saturating_sub(run.offset)).collect();
                of_queries.push(Angles::send(work, rope, &positions, factor)?);
                if op.keys == KeyForm::Unrotated {
                    of_keys.push(Angles::send(work, rope, &run.positions, factor)?);
                }
            }
            queries.push(of_queries);
            keys.push(of_keys);
        }
        let made = Arc::new(Self { queries, keys });
        work.plans().keep(key, Box::new(Arc::clone(rope)), &made);
        Ok(made)
    }
}

impl Entry {
    /// Returns the tokens of the longest run.
    pub(super) fn longest(&self) -> usize {
        self.runs.iter().map(|run| run.tokens).max().unwrap_or(0)
    }
}

impl Sent {
    /// Sends up one number.
    pub(super) fn one(work: &mut Work<'_>, number: f32) -> Result<Tensor> {
        let key: ListKey = smallvec![22, number.to_bits().into()];
        if let Some(known) = work.plans().get::<Self>(&key) {
            known.hold(work);
            return Ok(known.tensor.clone());
        }
        let made = Arc::new(Self::send(work, &[number], sys::ACL_FLOAT, &[1, 1, 1])?);
        work.plans().keep(key, Box::new(()), &made);
        Ok(made.tensor.clone())
    }
}
