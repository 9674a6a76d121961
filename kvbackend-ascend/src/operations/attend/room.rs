//! The lists for rows that are computed side by side. Every row has room for the same number of tokens. Room
//! that a row does not use is filled with copies of one token, whose logits are masked with −∞.

use std::sync::Arc;

use kvcore::device::capture::without_work;
use kvcore::{Attend, AttendWork, Error, KeyForm, Result, StepInputs};

use super::lists::{PackedLists, RoomLayout, RoomLists, RowRoom};
use super::plan::{SeenTokens, distinct, key_factor};
use crate::bindings::types as sys;
use crate::errors::uncapturable;
use crate::operations::angles::{AngleRows, cosines_and_sines};
use crate::operations::captured::WrittenRows;
use crate::operations::geometry::{RowGeometry, RowNumbers};
use crate::operations::matrix::PlaneMatrix;
use crate::operations::plans::{AttentionKey, ByAddress, PlanKey, StepWork};
use crate::operators::Tensor;
use crate::queue::Work;

/// The minimum number of tokens per row that a captured step has room for.
const LEAST_TOKENS: usize = 512;
/// The minimum number of distinct angles that a captured step has room for.
const LEAST_ANGLES: usize = 16;

/// The maximum number of key and value elements that are gathered at once.
const MOST: usize = 64 << 20;

/// The tokens that the rows of a step see.
struct StepTokens {
    /// Each row's tokens with their merge groups, or `None` for a row without a result.
    rows: Vec<Option<(SeenTokens, Vec<usize>)>>,
    distinct: Vec<i64>,
    which: Vec<i32>,
}

impl StepTokens {
    /// Collects the tokens that the rows of `work` see in this operation.
    fn of(op: &Attend, work: &Arc<AttendWork>) -> Self {
        let op = Attend { work: Arc::clone(work), ..op.clone() };
        let block_size = op.arena.layout().shape().block_size;
        let mut rows: Vec<Option<(SeenTokens, Vec<usize>)>> = op.work.rows().iter().map(|_| None).collect();
        for entry in op.work.batch() {
            for row in entry.rows.clone() {
                let (mut tokens, mut groups) = (SeenTokens::default(), Vec::new());
                for (segment, seen) in op.seen(entry, row).into_iter().filter(|(_, seen)| !seen.is_empty()) {
                    tokens.add(segment, seen, op.keys, block_size);
                    groups.resize(tokens.len(), segment.merge_group);
                }
                rows[row] = Some((tokens, groups));
            }
        }
        let angles: Vec<i64> =
            rows.iter().flatten().flat_map(|(tokens, _)| tokens.angles.iter().copied()).collect();
        let (distinct, which) = distinct(&angles);
        Self { rows, distinct, which }
    }

    /// Returns the number of tokens in the longest row, or `None` if no row has a result.
    fn longest(&self) -> Option<usize> {
        self.rows.iter().flatten().map(|(tokens, _)| tokens.len()).max()
    }
}

/// Returns whether `rows` rows of `tokens` tokens each may be gathered at once.
pub(super) fn has_room(rows: usize, tokens: usize, planes: &[PlaneMatrix; 2]) -> bool {
    let width: usize = planes.iter().map(|plane| plane.geometry.heads * plane.geometry.dim).sum();
    rows * tokens * width <= MOST
}

fn scales_of(work: &AttendWork) -> impl Iterator<Item = f32> + '_ {
    work.groups().iter().map(|group| group.lse_scale)
}

impl RowRoom {
    // Decision: docs/decisions/backend-ascend.md#rows-are-laid-out-side-by-side-captured-rows-with-spare-room
    /// Returns the capacity for a captured step, with room for its tokens to grow.
    fn of_capture(op: &Attend, step: &StepTokens, planes: &[PlaneMatrix; 2]) -> Result<Self> {
        let Some(longest) = step.longest() else { return Err(uncapturable("attention of no rows")) };
        let (rows, tokens) = (op.q.shape()[0], longest.next_power_of_two().max(LEAST_TOKENS));
        if !has_room(rows, tokens, planes) {
            return Err(uncapturable(&format!("attention of {rows} rows to {tokens} tokens each")));
        }
        let least = if op.keys == KeyForm::Rotated { LEAST_ANGLES } else { tokens };
        let angles = step.distinct.len().next_power_of_two().max(least);
        Ok(Self::with(op, tokens, angles, planes))
    }

    fn with(op: &Attend, tokens: usize, angles: usize, planes: &[PlaneMatrix; 2]) -> Self {
        let geometry = planes.each_ref().map(PlaneMatrix::geometries);
        let (keys, rope, rows) = (op.keys, op.rope.clone(), op.q.shape()[0]);
        Self { keys, rope, rows, tokens, angles, geometry, groups: scales_of(&op.work).collect() }
    }

    /// Builds a step's lists.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if the step exceeds the capacity or its merge groups differ from the
    /// captured ones, and [`Error::Mismatch`] if it has another number of rows.
    fn lists(&self, work: &AttendWork, step: StepTokens) -> Result<(PackedLists, RoomLayout)> {
        let outgrown = |what| Err(Error::GraphOutgrown { what });
        if !scales_of(work).eq(self.groups.iter().copied()) {
            return outgrown("merge groups");
        }
        if step.distinct.len() > self.angles {
            return outgrown("offsets");
        }
        if step.rows.len() != self.rows {
            return Err(Error::mismatch("rows of a captured step", self.rows, step.rows.len()));
        }
        let somewhere = step.rows.iter().flatten().find_map(|(tokens, _)| tokens.places.first());
        let (mut index, room) = ([const { (Vec::new(), Vec::new()) }; 2], self.rows * self.tokens);
        let mut masks = vec![vec![f32::NEG_INFINITY; room]; self.groups.len()];
        let mut factors = vec![1.0f32; room];
        let (mut which, mut next) = (vec![0i32; room], 0);
        let none = Default::default();
        for (row, tokens) in step.rows.iter().enumerate() {
            let (tokens, groups) = tokens.as_ref().unwrap_or(&none);
            if tokens.len() > self.tokens {
                return outgrown("tokens");
            }
            let range = row * self.tokens..row * self.tokens + tokens.len();
            groups.iter().zip(range.clone()).for_each(|(&group, at)| masks[group][at] = 0.0);
            factors[range.clone()].copy_from_slice(&tokens.factors);
            which[range].copy_from_slice(&step.which[next..next + tokens.len()]);
            next += tokens.len();
            let filler = *tokens.places.first().or(somewhere).unwrap_or(&(0, 0));
            let mut places = tokens.places.clone();
            places.resize(self.tokens, filler);
            for (index, (geometry, scales)) in index.iter_mut().zip(&self.geometry) {
                index.0.extend(geometry.by_head(&places));
                index.1.extend(scales.iter().flat_map(|scales| scales.by_head(&places)));
            }
        }
        let placed: Vec<i64> =
            step.rows.iter().zip(0..).map(|(row, at)| if row.is_some() { at } else { -1 }).collect();
        let chosen = WrittenRows::new(&placed)?;
        let mut angles = step.distinct;
        angles.resize(self.angles, 0);
        let [keys, queries] = match &self.rope {
            None => Default::default(),
            Some(rope) => {
                let positions: Vec<i64> = work.rows().iter().map(|row| row.position).collect();
                [
                    cosines_and_sines(rope, &angles, key_factor(rope, self.keys))?,
                    cosines_and_sines(rope, &positions, rope.attention_factor())?,
                ]
            }
        };
        let mut lists = PackedLists::default();
        let layout = RoomLayout {
            index: index
                .map(|(index, scales)| (lists.add(&index), (!scales.is_empty()).then(|| lists.add(&scales)))),
            masks: masks.iter().map(|mask| lists.add(mask)).collect(),
            factors: lists.add(&factors),
            which: lists.add(&which),
            key_angles: [lists.add(&keys.0), lists.add(&keys.1)],
            query_angles: [lists.add(&queries.0), lists.add(&queries.1)],
            chosen: lists.add(&chosen.numbers()),
            places: lists.add(&chosen.places.iter().map(|&place| place as i32).collect::<Vec<_>>()),
        };
        Ok((lists, layout))
    }
}

impl RoomLists {
    /// Returns an operation's lists, which are built once for all layers of a step.
    pub(super) fn of(
        work: &mut StepWork<'_, '_>,
        op: &Attend,
        planes: &[PlaneMatrix; 2],
    ) -> Result<Arc<Self>> {
        let key = PlanKey::SideBySide {
            work: AttentionKey::of(op),
            planes: planes.each_ref().map(PlaneMatrix::geometries),
            rope: op.rope.as_ref().map(ByAddress::of),
        };
        work.shared(key, |work| Ok(Arc::new(Self::send(work, op, planes)?)))
    }

    fn send(work: &mut Work<'_>, op: &Attend, planes: &[PlaneMatrix; 2]) -> Result<Self> {
        let step = StepTokens::of(op, &op.work);
        if work.captured_step().is_some() {
            let room = RowRoom::of_capture(op, &step, planes)?;
            let (lists, layout) = room.lists(&op.work, step)?;
            let (of_replays, op) = (room.clone(), without_work(op));
            let make = move |step: &StepInputs| {
                let tokens = StepTokens::of(&op, &step.work);
                Ok(of_replays.lists(&step.work, tokens)?.0.0)
            };
            let at = work.replayed_list(lists.0.len(), Box::new(make))?;
            return Ok(Self { room, at, layout, list: None });
        }
        let (tokens, angles) = (step.longest().unwrap_or(0).max(1), step.distinct.len().max(1));
        let room = RowRoom::with(op, tokens, angles, planes);
        let (lists, layout) = room.lists(&op.work, step)?;
        let list = work.send(&lists.0)?;
        Ok(Self { room, at: list.address(), layout, list: Some(list) })
    }

    /// Returns a tensor over `len` row indices, which start at the given offset in bytes.
    pub(super) fn numbers(&self, offset: usize, len: usize) -> Tensor {
        Tensor::dense(self.at + offset as u64, sys::ACL_INT32, &[len])
    }

    /// Returns a tensor with one value per token of each row, `[rows, 1, tokens]`, which starts at the given
    /// offset in bytes.
    pub(super) fn of_tokens(&self, offset: usize) -> Tensor {
        Tensor::dense(self.at + offset as u64, sys::ACL_FLOAT, &[self.room.rows, 1, self.room.tokens])
    }

    /// Returns the angles at the given offsets, or `None` if rows are not rotated.
    pub(super) fn angles(&self, [cos, sin]: [usize; 2], rows: usize) -> Option<AngleRows> {
        let rope = self.room.rope.as_ref()?;
        let half = rope.config().rotary_dim / 2;
        let rows = |offset| Tensor::dense(self.at + offset as u64, sys::ACL_FLOAT, &[rows, half]);
        Some(AngleRows { cos: rows(cos), sin: rows(sin), pairing: rope.pairing() })
    }

    /// Returns all rows' keys (plane 0) or values (plane 1), `[rows, heads, tokens, dim]` in f32.
    pub(super) fn gathered(
        &self,
        work: &mut Work<'_>,
        planes: &[PlaneMatrix; 2],
        which: usize,
    ) -> Result<Tensor> {
        let (rows, tokens) = (self.room.rows, self.room.tokens);
        let ((geometry, of_scales), (rows_at, scales_at)) =
            (self.room.geometry[which], self.layout.index[which]);
        let numbers =
            |offset, geometry: RowGeometry| self.numbers(offset, rows * tokens * geometry.rows_of_slot());
        let scales = scales_at.zip(of_scales).map(|(offset, geometry)| numbers(offset, geometry));
        let numbers = RowNumbers { rows: numbers(rows_at, geometry), scales };
        planes[which].read_by_head(work, &numbers, (rows, tokens))
    }
}
