//! The plan of an attention operation: for each entry, the tokens of each merge group, the slots that store
//! them, the rotation of their keys, and the rows that see them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Attend, AttendRows, KeyForm, Result, Rope, Segment};

use super::lists::{AttentionPlan, GroupTokens, KeyRotation, PackedLists, PlanAngles, PlannedEntry};
use crate::bindings::types as sys;
use crate::operations::angles::SentAngles;
use crate::operations::geometry::{RowGeometry, RowNumbers};
use crate::operations::matrix::PlaneMatrix;
use crate::operations::plans::{AttentionKey, ByAddress, PlanKey, StepWork};
use crate::operators::Tensor;

/// The tokens that a row sees, in list order.
#[derive(Debug, Default)]
pub(super) struct SeenTokens {
    /// Each token's block index and its offset in the block.
    pub(super) places: Vec<(usize, usize)>,
    /// The angle, as a position, by which each token's key is rotated when it is read.
    pub(super) angles: Vec<i64>,
    pub(super) factors: Vec<f32>,
}

impl SeenTokens {
    /// Appends a range of a segment's tokens.
    pub(super) fn add(&mut self, segment: &Segment, tokens: Range<usize>, keys: KeyForm, block_size: usize) {
        for token in tokens {
            self.places.push((segment.blocks[token / block_size].index(), token % block_size));
            // A key that was rotated when it was stored only needs the remaining rotation. The query's own
            // rotation does not change, because the product of query and key depends only on the distance
            // between their positions.
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

/// Returns the distinct numbers in the order of their first use, and for each input number the index of its
/// value among them.
pub(super) fn distinct(numbers: &[i64]) -> (Vec<i64>, Vec<i32>) {
    let (mut known, mut last) = (HashMap::new(), (i64::MIN, -1));
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

/// A run whose lists have not been sent yet.
struct RunDraft<'a> {
    group: usize,
    /// For each segment: the union of the tokens that the rows see in it, and the index within the run of the
    /// first of these tokens.
    parts: Vec<(&'a Segment, Range<usize>, usize)>,
    tokens: SeenTokens,
}

/// The offset in bytes and the length of a packed list of indices.
type PackedNumbers = (usize, usize);

/// The offsets of a run's packed lists, in bytes.
struct PackedRun {
    places: [(PackedNumbers, Option<PackedNumbers>); 2],
    factors: Option<usize>,
    mask: Option<usize>,
    rotation: Option<(Vec<i64>, usize)>,
}

/// Returns an operation's plan, which is built once for all layers of a step.
pub(super) fn plan(
    work: &mut StepWork<'_, '_>,
    op: &Attend,
    planes: &[PlaneMatrix; 2],
) -> Result<Arc<AttentionPlan>> {
    let geometries = [planes[0].geometries(), planes[1].geometries()];
    let key = PlanKey::Attention { work: AttentionKey::of(op), planes: geometries };
    work.shared(key, |work| Ok(Arc::new(send(work, op, planes)?)))
}

/// Builds a plan, and sends its lists to the device.
fn send(work: &mut StepWork<'_, '_>, op: &Attend, planes: &[PlaneMatrix; 2]) -> Result<AttentionPlan> {
    let mut lists = PackedLists::default();
    let drafts: Vec<(&AttendRows, Vec<RunDraft<'_>>)> =
        op.work.batch().iter().map(|entry| (entry, drafts(op, entry))).collect();
    let mut packed = Vec::new();
    for (entry, runs) in &drafts {
        packed.extend(runs.iter().map(|run| pack(&mut lists, op, entry, run, planes)));
    }
    let lists = work.send(&lists.0)?;
    let mut packed = packed.into_iter();
    let at = |offset: usize| lists.address() + offset as u64;
    let numbers = |(offset, len): PackedNumbers| Tensor::dense(at(offset), sys::ACL_INT32, &[len]);
    let mut entries = Vec::new();
    for (entry, runs) in drafts {
        let count = entry.rows.len();
        let runs = runs.iter().zip(packed.by_ref()).map(|(run, packed)| {
            let tokens = run.tokens.len();
            let floats = |offset, dims: &[usize]| Tensor::dense(at(offset), sys::ACL_FLOAT, dims);
            GroupTokens {
                group: run.group,
                tokens,
                places: packed
                    .places
                    .map(|(rows, scales)| RowNumbers { rows: numbers(rows), scales: scales.map(numbers) }),
                factors: packed.factors.map(|offset| floats(offset, &[1, 1, tokens])),
                mask: packed.mask.map(|offset| floats(offset, &[1, count, tokens])),
                rotation: packed
                    .rotation
                    .map(|(distinct, offset)| KeyRotation { distinct, which: numbers((offset, tokens)) }),
            }
        });
        entries.push(PlannedEntry { rows: entry.rows.clone(), runs: runs.collect() });
    }
    Ok(AttentionPlan { entries, lists })
}

/// Gathers an entry's tokens into one run per merge group.
fn drafts<'a>(op: &Attend, entry: &'a AttendRows) -> Vec<RunDraft<'a>> {
    let mut union: Vec<Option<Range<usize>>> = vec![None; entry.segments.len()];
    for row in entry.rows.clone() {
        for (segment, tokens) in op.seen(entry, row).into_iter().filter(|(_, tokens)| !tokens.is_empty()) {
            let seen = &mut union[number(entry, segment)];
            *seen = Some(match seen.take() {
                None => tokens,
                Some(seen) => seen.start.min(tokens.start)..seen.end.max(tokens.end),
            });
        }
    }
    let block_size = op.arena.layout().shape().block_size;
    let mut runs: Vec<RunDraft<'a>> = Vec::new();
    for (segment, tokens) in entry.segments.iter().zip(union) {
        let Some(tokens) = tokens else { continue };
        let at = runs.iter().position(|run| run.group == segment.merge_group).unwrap_or(runs.len());
        if at == runs.len() {
            let group = segment.merge_group;
            runs.push(RunDraft { group, parts: Vec::new(), tokens: SeenTokens::default() });
        }
        let run = &mut runs[at];
        run.parts.push((segment, tokens.clone(), run.tokens.len()));
        run.tokens.add(segment, tokens, op.keys, block_size);
    }
    runs
}

/// Returns the index of a segment in an entry.
fn number(entry: &AttendRows, segment: &Segment) -> usize {
    entry.segments.iter().position(|known| std::ptr::eq(known, segment)).unwrap_or_default()
}

/// Packs a run's lists.
fn pack(
    lists: &mut PackedLists,
    op: &Attend,
    entry: &AttendRows,
    run: &RunDraft<'_>,
    planes: &[PlaneMatrix; 2],
) -> PackedRun {
    let SeenTokens { places, angles, factors } = &run.tokens;
    let rotated = op.rope.is_some() && (op.keys == KeyForm::Unrotated || angles.iter().any(|&a| a != 0));
    PackedRun {
        places: planes.each_ref().map(|plane| {
            let (rows, scales) = plane.geometries();
            let scales = scales.map(|scales| index(lists, scales, places));
            (index(lists, rows, places), scales)
        }),
        factors: factors.iter().any(|&factor| factor != 1.0).then(|| lists.add(factors)),
        mask: mask(op, entry, run).map(|mask| lists.add(&mask)),
        rotation: rotated.then(|| {
            let (distinct, which) = distinct(angles);
            (distinct, lists.add(&which))
        }),
    }
}

fn index(lists: &mut PackedLists, geometry: RowGeometry, tokens: &[(usize, usize)]) -> PackedNumbers {
    let index = geometry.by_head(tokens);
    (lists.add(&index), index.len())
}

/// Returns the run's mask: 0 where a row sees a token, and −∞ elsewhere. Returns `None` if all rows see all
/// tokens.
fn mask(op: &Attend, entry: &AttendRows, run: &RunDraft<'_>) -> Option<Vec<f32>> {
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

/// Returns the factor for the cosines and sines of keys that are rotated when they are read: the embedding's
/// attention factor if the keys were stored without rotation, otherwise 1.
pub(super) fn key_factor(rope: &Rope, keys: KeyForm) -> f32 {
    match keys {
        KeyForm::Rotated => 1.0,
        KeyForm::Unrotated => rope.attention_factor(),
    }
}

/// Returns a plan's angles, which are built once for all layers that share a rotary embedding.
pub(super) fn angles(
    work: &mut StepWork<'_, '_>,
    plan: &AttentionPlan,
    rope: &Arc<Rope>,
    op: &Attend,
) -> Result<Arc<PlanAngles>> {
    let key = PlanKey::AttentionAngles { work: AttentionKey::of(op), rope: ByAddress::of(rope) };
    work.shared(key, |work| {
        let (mut queries, mut keys) = (Vec::new(), Vec::new());
        for entry in &plan.entries {
            let rows = op.work.rows()[entry.rows.clone()].iter();
            let positions: Vec<i64> = rows.map(|row| row.position).collect();
            queries.push(SentAngles::send(work, rope, &positions, rope.attention_factor())?);
            let of_run = |run: &GroupTokens| {
                let factor = key_factor(rope, op.keys);
                let send = |rotation: &KeyRotation| SentAngles::send(work, rope, &rotation.distinct, factor);
                run.rotation.as_ref().map(send).transpose()
            };
            keys.push(entry.runs.iter().map(of_run).collect::<Result<_>>()?);
        }
        Ok(Arc::new(PlanAngles { queries, keys }))
    })
}
