//! Attention of rows side by side, each with room for so many tokens: one row of operators for all of them, whatever their
//! segments are. Places without a token name one that the row sees, with a mask of −∞.
//!
//! Batches of sequences that decode run so, and captured steps: a replay may bring other blocks, lengths, offsets and
//! segments, as long as each row's tokens have room.

use std::sync::Arc;

use kvcore::device::capture::without_work;
use kvcore::{Attend, AttendWork, Error, KeyForm, Result, Rope, StepInputs};

use super::plan::{Lists, Tokens, distinct, key, key_factor};
use super::softmax::{self, Partial};
use super::{Call, factored, products};
use crate::bindings::types as sys;
use crate::operations::captured::Chosen;
use crate::operations::places::{Geometry, PlaneRows, RowNumbers};
use crate::operations::plans::Sent;
use crate::operations::turn::{Turn, cosines_and_sines, in_f32};
use crate::operators::Tensor;
use crate::stream::capture::uncapturable;
use crate::stream::{Held, Upload, Work};

/// Least tokens that a row has room for, and least angles.
const LEAST_TOKENS: usize = 512;
const LEAST_ANGLES: usize = 16;

/// Most elements of keys and values that are gathered at once.
const MOST: usize = 64 << 20;

/// The room of rows.
#[derive(Debug, Clone)]
struct Room {
    keys: KeyForm,
    rope: Option<Arc<Rope>>,
    rows: usize,
    /// Tokens of a row.
    tokens: usize,
    /// Angles by which keys are rotated.
    angles: usize,
    /// The geometry of K and of V, each with that of its scales.
    geometry: [(Geometry, Option<Geometry>); 2],
    /// The factor on the log-sum-exp of each merge group.
    groups: Vec<f32>,
}

/// Where the lists of a room are on the device.
#[derive(Debug)]
struct Places {
    room: Room,
    at: u64,
    layout: Layout,
    /// The lists themselves; none where each replay of a graph brings its own.
    upload: Option<Arc<Upload>>,
}

/// Offsets of the lists, in bytes.
#[derive(Debug)]
struct Layout {
    index: [(usize, Option<usize>); 2],
    masks: Vec<usize>,
    factors: usize,
    which: usize,
    key_angles: [usize; 2],
    query_angles: [usize; 2],
    chosen: usize,
    places: usize,
}

/// What a step brings to a room.
struct Contents {
    /// The tokens of each row, and the merge group of each; none for rows that nothing is computed for.
    rows: Vec<Option<(Tokens, Vec<usize>)>>,
    distinct: Vec<i64>,
    which: Vec<i32>,
}

/// Gathers what a step brings.
fn contents(op: &Attend, work: &Arc<AttendWork>) -> Contents {
    let op = Attend { work: Arc::clone(work), ..op.clone() };
    let block_size = op.arena.layout().shape().block_size;
    let mut rows: Vec<Option<(Tokens, Vec<usize>)>> = op.work.rows().iter().map(|_| None).collect();
    for entry in op.work.batch() {
        for row in entry.rows.clone() {
            let (mut tokens, mut groups) = (Tokens::default(), Vec::new());
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
    Contents { rows, distinct, which }
}

impl Contents {
    /// Returns the tokens of the row that has most; none without rows.
    fn longest(&self) -> Option<usize> {
        self.rows.iter().flatten().map(|(tokens, _)| tokens.len()).max()
    }
}

/// Returns the elements of a token's keys and values.
fn width(planes: &[PlaneRows; 2]) -> usize {
    planes.iter().map(|plane| plane.geometry.heads * plane.geometry.dim).sum()
}

fn scales_of(work: &AttendWork) -> impl Iterator<Item = f32> + '_ {
    work.groups().iter().map(|group| group.lse_scale)
}

impl Room {
    /// Returns the room that a captured step needs, with some more.
    fn of_capture(op: &Attend, contents: &Contents, planes: &[PlaneRows; 2]) -> Result<Self> {
        let Some(longest) = contents.longest() else { return Err(uncapturable("attention of no rows")) };
        let (rows, tokens) = (op.q.shape()[0], longest.next_power_of_two().max(LEAST_TOKENS));
        if rows * tokens * width(planes) > MOST {
            return Err(uncapturable(&format!("attention of {rows} rows to {tokens} tokens each")));
        }
        let least = if op.keys == KeyForm::Rotated { LEAST_ANGLES } else { tokens };
        let angles = contents.distinct.len().next_power_of_two().max(least);
        Ok(Self::with(op, tokens, angles, planes))
    }

    fn with(op: &Attend, tokens: usize, angles: usize, planes: &[PlaneRows; 2]) -> Self {
        let of = |plane: &PlaneRows| (plane.geometry, plane.scales.as_ref().map(|scales| scales.geometry));
        let geometry = [of(&planes[0]), of(&planes[1])];
        let (keys, rope, rows) = (op.keys, op.rope.clone(), op.q.shape()[0]);
        Self { keys, rope, rows, tokens, angles, geometry, groups: scales_of(&op.work).collect() }
    }

    /// Makes the lists of a step.
    ///
    /// # Errors
    /// Returns [`Error::GraphOutgrown`] if the step needs more room, or other merge groups.
    fn lists(&self, work: &AttendWork, contents: Contents) -> Result<(Lists, Layout)> {
        let outgrown = |what| Err(Error::GraphOutgrown { what });
        if !scales_of(work).eq(self.groups.iter().copied()) {
            return outgrown("merge groups");
        }
        if contents.distinct.len() > self.angles {
            return outgrown("offsets");
        }
        if contents.rows.len() != self.rows {
            let (what, expected, got) = ("rows of a captured step", self.rows, contents.rows.len());
            return Err(Error::Mismatch { what, expected, got });
        }
        let somewhere = contents.rows.iter().flatten().find_map(|(tokens, _)| tokens.places.first());
        let (mut index, room) = ([const { (Vec::new(), Vec::new()) }; 2], self.rows * self.tokens);
        let mut masks = vec![vec![f32::NEG_INFINITY; room]; self.groups.len()];
        let mut factors = vec![1.0f32; room];
        let (mut which, mut next) = (vec![0i32; room], 0);
        let none = Default::default();
        for (row, tokens) in contents.rows.iter().enumerate() {
            let (tokens, groups) = tokens.as_ref().unwrap_or(&none);
            if tokens.len() > self.tokens {
                return outgrown("tokens");
            }
            let range = row * self.tokens..row * self.tokens + tokens.len();
            groups.iter().zip(range.clone()).for_each(|(&group, at)| masks[group][at] = 0.0);
            factors[range.clone()].copy_from_slice(&tokens.factors);
            which[range].copy_from_slice(&contents.which[next..next + tokens.len()]);
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
            contents.rows.iter().zip(0..).map(|(row, at)| if row.is_some() { at } else { -1 }).collect();
        let chosen = Chosen::new(&placed)?;
        let mut angles = contents.distinct;
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
        let mut lists = Lists::default();
        let layout = Layout {
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

impl Places {
    /// Returns the lists of an operation, which the layers of the step share.
    fn of(work: &mut Work<'_>, op: &Attend, planes: &[PlaneRows; 2]) -> Result<Arc<Self>> {
        let mut key = key(op, 40, &planes[0], &planes[1]);
        key.push(op.rope.as_ref().map_or(0, |rope| Arc::as_ptr(rope) as u64));
        if let Some(known) = work.plans().get::<Self>(&key) {
            known.hold(work);
            return Ok(known);
        }
        let contents = contents(op, &op.work);
        let made = if work.captured_step().is_some() {
            let room = Room::of_capture(op, &contents, planes)?;
            let (lists, layout) = room.lists(&op.work, contents)?;
            let (of_replays, op) = (room.clone(), without_work(op));
            let make = move |step: &StepInputs| {
                let contents = self::contents(&op, &step.work);
                Ok(of_replays.lists(&step.work, contents)?.0.0)
            };
            let at = work.replayed_list(lists.0.len(), Box::new(make))?;
            Self { room, at, layout, upload: None }
        } else {
            let (tokens, angles) = (contents.longest().unwrap_or(0).max(1), contents.distinct.len().max(1));
            let room = Room::with(op, tokens, angles, planes);
            let (lists, layout) = room.lists(&op.work, contents)?;
            let upload = work.send(&lists.0)?;
            Self { room, at: upload.address(), layout, upload: Some(upload) }
        };
        let made = Arc::new(made);
        work.plans().keep(key, Box::new(op.rope.clone()), &made);
        Ok(made)
    }

    /// Holds the lists until the work is done. A graph holds those that its replays bring.
    fn hold(&self, work: &mut Work<'_>) {
        if let Some(upload) = &self.upload {
            work.hold(Held::Upload(Arc::clone(upload)));
        }
    }

    fn numbers(&self, place: usize, len: usize) -> Tensor {
        Tensor::dense(self.at + place as u64, sys::ACL_INT32, &[len])
    }

    /// Returns a number for each token of each row, `[rows, 1, tokens]`.
    fn of_tokens(&self, place: usize) -> Tensor {
        Tensor::dense(self.at + place as u64, sys::ACL_FLOAT, &[self.room.rows, 1, self.room.tokens])
    }

    /// Returns angles, if rows are rotated.
    fn angles(&self, [cos, sin]: [usize; 2], rows: usize) -> Option<Turn> {
        let rope = self.room.rope.as_ref()?;
        let half = rope.config().rotary_dim / 2;
        let rows = |place| Tensor::dense(self.at + place as u64, sys::ACL_FLOAT, &[rows, half]);
        Some(Turn { cos: rows(cos), sin: rows(sin), pairing: rope.pairing() })
    }

    /// Returns the keys or values of all rows, `[rows, heads, tokens, dim]` in f32.
    fn gathered(&self, work: &mut Work<'_>, plane: &PlaneRows, which: usize) -> Result<Tensor> {
        let (rows, tokens) = (self.room.rows, self.room.tokens);
        let ((geometry, of_scales), (place, scales)) = (self.room.geometry[which], self.layout.index[which]);
        let numbers =
            |place, geometry: Geometry| self.numbers(place, rows * tokens * geometry.rows_of_slot());
        let scales = scales.zip(of_scales).map(|(place, geometry)| numbers(place, geometry));
        let numbers = RowNumbers { rows: numbers(place, geometry), scales };
        plane.read_by_head(work, &numbers, (rows, tokens))
    }
}

impl Call<'_> {
    /// Returns whether rows side by side take fewer operators and not much more work than one entry after another: if there
    /// are several entries of one row each, of not too different lengths.
    pub(super) fn is_a_batch(&self) -> bool {
        let batch = self.op.work.batch();
        let lengths =
            || batch.iter().map(|entry| entry.segments.iter().map(|segment| segment.len).sum::<usize>());
        let (longest, all) = (lengths().max().unwrap_or(0), lengths().sum::<usize>());
        let (rows, width) = (self.q.dim(0), width(&self.planes));
        batch.len() > 1
            && batch.iter().all(|entry| entry.rows.len() == 1 && entry.selection.is_none())
            && rows * longest <= 2 * all
            && rows * longest * width <= MOST
    }

    /// Computes all rows side by side.
    pub(super) fn side_by_side(&self, work: &mut Work<'_>) -> Result<()> {
        let lists = Places::of(work, self.op, &self.planes)?;
        let (rows, tokens, heads) = (lists.room.rows, lists.room.tokens, self.heads);
        let k = lists.gathered(work, &self.planes[0], 0)?;
        let v = lists.gathered(work, &self.planes[1], 1)?;
        if let Some(angles) = lists.angles(lists.layout.key_angles, lists.room.angles) {
            let which = lists.numbers(lists.layout.which, rows * tokens);
            angles.spread(work, &which)?.turn(work, &k, &[rows, 1, tokens])?;
        }
        let q = in_f32(work, &self.q)?;
        if let Some(angles) = lists.angles(lists.layout.query_angles, rows) {
            angles.turn(work, &q, &[rows, 1])?;
        }
        let kv_heads = rows * self.planes[0].geometry.heads;
        let all = [rows * heads, 1, tokens];
        let k = k.reshaped(&[kv_heads, tokens, k.dim(3)]);
        let of_values = rows * self.planes[1].geometry.heads;
        let v = v.reshaped(&[of_values, tokens, v.dim(3)]);
        let scores = products(work, &q.reshaped(&[all[0], 1, q.dim(2)]), &k)?;
        if let Some(latent) = &self.latent {
            let latent = in_f32(work, latent)?;
            let latent = latent.reshaped(&[all[0], 1, latent.dim(2)]);
            let of_latents = products(work, &latent, &v)?;
            work.add(&scores, &of_latents, &scores)?;
        }
        let by_row = scores.reshaped(&[rows, heads, tokens]);
        work.mul(&by_row, &lists.of_tokens(lists.layout.factors), &by_row)?;
        factored(work, self.op, &by_row)?;
        let floor = Sent::one(work, softmax::FLOOR)?;
        let tiny = Sent::one(work, softmax::TINY)?;
        let several = lists.room.groups.len() > 1;
        let mut all: Option<Partial> = None;
        for (&place, &scale) in lists.layout.masks.iter().zip(&lists.room.groups) {
            // The softmax of a group overwrites its logits.
            let own = if several { work.temporary(sys::ACL_FLOAT, &by_row.dims())? } else { by_row.clone() };
            work.add(&by_row, &lists.of_tokens(place), &own)?;
            let mut group = Partial::of(work, &own.reshaped(&[rows * heads, 1, tokens]), None, &v, &floor)?;
            if several || scale != 1.0 {
                group = group.into_one(work, scale, &floor, &tiny)?;
            }
            all = Some(match all {
                None => group,
                Some(known) => known.merged(work, &group)?,
            });
        }
        // The check of an operation has seen that there is a group for each segment.
        let Some(partial) = all else { return Err(uncapturable("attention without merge groups")) };
        let values = partial.values(work, &tiny)?;
        let values = values.reshaped(&[rows, heads * v.dim(2)]);
        put(work, &lists, &values, &self.out)?;
        if let Some(lse) = &self.lse {
            let sums = partial.lse(work)?.reshaped(&[rows, heads]);
            put(work, &lists, &sums, lse)?;
        }
        Ok(())
    }
}

/// Writes the rows that something was computed for, and leaves the others as they are.
fn put(work: &mut Work<'_>, lists: &Places, x: &Tensor, out: &Tensor) -> Result<()> {
    let (rows, width) = (x.dim(0), x.dim(1));
    let chosen = work.temporary(sys::ACL_FLOAT, &[rows, width])?;
    work.take_rows(x, &lists.numbers(lists.layout.chosen, rows), &chosen)?;
    let mut rounded = chosen;
    if out.dtype() != rounded.dtype() {
        let to = work.temporary(out.dtype(), &[rows, width])?;
        work.convert(&rounded, &to)?;
        rounded = to;
    }
    let places = lists.numbers(lists.layout.places, rows);
    if out.is_dense() {
        return work.put_rows(&out.reshaped(&[rows, width]), &places, &rounded);
    }
    let dense = work.temporary(out.dtype(), &out.dims())?;
    work.convert(out, &dense)?;
    work.put_rows(&dense.reshaped(&[rows, width]), &places, &rounded)?;
    work.convert(&dense, out)
}
