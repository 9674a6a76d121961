//! Recomputation by deviation: all tokens are computed up to a checkpoint, and only the chosen tokens
//! continue.
//!
//! Up to the checkpoint, all chunk tokens and the question are computed under full attention into scratch
//! blocks, piece by piece. At the checkpoint, the fresh keys and values of each token are compared with the
//! stored keys and values, and the strategy chooses tokens. The chosen tokens' rows are moved to
//! copy-on-write blocks, where all other tokens keep their stored KV. (CacheBlend, Yao et al., 2024.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use kvchunk::{
    AssembledPrompt, ChunkedPrompt, ContextScaling, DeviationCheck, DeviationOf, Findings, RecomputeStrategy,
    ScratchBlocks, TokenScores, TokenSelection,
};
use kvcore::{LayerRopes, Logits, Scatter, SequenceInput, SlotMapping, TensorView, WriteSlots};
use kvmodel::{FreshKv, KeptRows, KvRows, Narrowed, Observer, PassMemory, read_f32};

use super::context::Context;
use crate::error::{Error, Result};
use crate::runner::Runner;

// Decision: docs/decisions/chunks.md#a-blend-chooses-once
/// A computation that replaces the KV of some tokens in stored chunks with fresh KV, in passes of limited
/// size.
///
/// ```text
/// compute a piece up to the checkpoint, keep its rows ─► … ─► choose
///                      ─► go on with the chosen rows of a piece ─► … ─► logits
/// ```
#[derive(Debug)]
pub(super) struct Blend {
    compared: DeviationOf,
    layer: usize,
    scratch: ScratchBlocks,
    question: SequenceInput,
    /// The findings that the strategy already has, to which the blend adds the deviations.
    found: Findings,
    /// The pieces that were computed up to the checkpoint, in order, each with its number of rows.
    kept: VecDeque<(KeptRows, usize)>,
    /// The total number of rows computed up to the checkpoint so far.
    done: usize,
    keys: Distances,
    values: Distances,
    /// The rows that continue after the checkpoint, once they are chosen.
    chosen: Option<ChosenRows>,
}

/// The rows that continue after the checkpoint.
#[derive(Debug)]
struct ChosenRows {
    /// The indices of the rows left to compute, in ascending order, counted across all pieces.
    rows: VecDeque<u32>,
    /// The inputs of the chosen rows.
    batch: Vec<SequenceInput>,
    /// The number of chosen rows that have been computed to the end.
    done: usize,
    /// The total number of rows in the pieces that are finished and no longer kept.
    passed: u32,
    /// The number of chunk tokens among the chosen rows.
    tokens: usize,
}

/// The result of computing one piece of a blend.
#[derive(Debug)]
pub(super) struct Blended {
    /// The number of rows in the pass.
    pub(super) rows: usize,
    pub(super) flops: u64,
    /// The number of recomputed chunk tokens, and the logits after the question. `None` until all rows are
    /// computed.
    pub(super) end: Option<(usize, Vec<f32>)>,
}

/// The distances between fresh rows and stored rows.
#[derive(Debug, Default)]
struct Distances {
    /// The squared distance of each row.
    rows: Vec<f64>,
    /// The sum of the squares of all fresh rows.
    squares: f64,
}

/// The prompt to blend, and everything needed to compute it.
pub(super) struct BlendSource<'a> {
    pub(super) runner: &'a Runner,
    pub(super) ropes: &'a LayerRopes,
    pub(super) prompt: &'a ChunkedPrompt,
    pub(super) strategy: &'a dyn RecomputeStrategy,
    pub(super) scaling: ContextScaling,
}

impl Blend {
    /// Creates a blend, and allocates scratch blocks for the chunk tokens. `question` must already have its
    /// final slots.
    pub(super) fn new(
        source: &BlendSource<'_>,
        assembled: &AssembledPrompt,
        question: SequenceInput,
        (check, found): (DeviationCheck, Findings),
    ) -> Result<Self> {
        Ok(Self {
            compared: check.of,
            layer: check.layer,
            scratch: assembled.scratch(source.prompt, source.runner.caches.paged_cache()?.pool())?,
            question,
            found,
            kept: VecDeque::new(),
            done: 0,
            keys: Distances::default(),
            values: Distances::default(),
            chosen: None,
        })
    }

    /// Returns the number of rows left to compute. Until the tokens are chosen, only rows up to the
    /// checkpoint count.
    pub(super) fn left(&self) -> usize {
        match &self.chosen {
            None => (self.chunk_rows() + self.question.tokens.len() - self.done).max(1),
            Some(chosen) => chosen.rows.len(),
        }
    }

    fn chunk_rows(&self) -> usize {
        self.scratch.inputs().iter().map(|input| input.tokens.len()).sum()
    }

    /// Computes the next piece, of at most `most` rows. An error leaves the blend unchanged.
    pub(super) fn advance(
        &mut self,
        source: &BlendSource<'_>,
        assembled: &mut AssembledPrompt,
        most: usize,
        observer: &mut dyn Observer,
    ) -> Result<Blended> {
        let whole = self.chunk_rows() + self.question.tokens.len();
        if self.done < whole {
            return self.up_to_checkpoint(source, self.done..whole.min(self.done + most), observer);
        }
        if self.chosen.is_none() {
            self.chosen = Some(source.runner.profiler.span("checkpoint", || self.choose(source, assembled))?);
        }
        self.after_checkpoint(source, most, observer)
    }

    /// Computes some rows up to the checkpoint, and compares the chunk rows among them with the stored rows.
    fn up_to_checkpoint(
        &mut self,
        source: &BlendSource<'_>,
        rows: Range<usize>,
        observer: &mut dyn Observer,
    ) -> Result<Blended> {
        let (runner, device, mut memory) = (source.runner, source.runner.device(), PassMemory::default());
        let context = Context::scaled(source.scaling, self.scratch.segments());
        let question = context.of_question(&self.question);
        let inputs = self.scratch.inputs().iter().chain([&question]);
        let batch = pieces(inputs, rows.clone())?;
        let mut pass = runner.model.begin(&device, source.ropes, &batch, &mut memory)?;
        pass.run_to(self.layer, observer)?;
        let fresh = pass.fresh()?;
        let (keys, values) = self.distances(runner, &fresh, rows.clone())?;
        let (kept, flops) = pass.keep();
        self.keys.add(keys);
        self.values.add(values);
        self.kept.push_back((kept, rows.len()));
        self.done = rows.end;
        Ok(Blended { rows: rows.len(), flops, end: None })
    }

    /// Runs up to `most` of the next piece's chosen rows through the layers after the checkpoint.
    fn after_checkpoint(
        &mut self,
        source: &BlendSource<'_>,
        most: usize,
        observer: &mut dyn Observer,
    ) -> Result<Blended> {
        let (runner, device, mut memory) = (source.runner, source.runner.device(), PassMemory::default());
        let Some(chosen) = &mut self.chosen else { return Err(Error::EmptyPrompt) };
        // Pieces without chosen rows are dropped.
        while let (Some((_, len)), Some(&next)) = (self.kept.front(), chosen.rows.front()) {
            if next < chosen.passed + *len as u32 {
                break;
            }
            chosen.passed += *len as u32;
            self.kept.pop_front();
        }
        let Some((piece, len)) = self.kept.front() else { return Err(Error::EmptyPrompt) };
        let end = chosen.passed + *len as u32;
        let in_piece = chosen.rows.iter().take_while(|&&row| row < end).take(most);
        let rows: Vec<u32> = in_piece.map(|row| row - chosen.passed).collect();
        let count = rows.len();
        let mut batch = pieces(chosen.batch.iter(), chosen.done..chosen.done + count)?;
        let last = chosen.rows.len() == count;
        if let Some(input) = batch.last_mut().filter(|_| last) {
            input.logits = Logits::Last;
        }
        let pass =
            runner.model.resume(&device, source.ropes, piece, Narrowed { rows, batch }, &mut memory)?;
        let pass = pass.end(observer)?;
        chosen.done += count;
        chosen.rows.drain(..count);
        let flops = pass.flops;
        let end = match pass.logits.filter(|_| last) {
            Some(logits) => Some((chosen.tokens, logits.into_last())),
            None if last => return Err(Error::EmptyPrompt),
            None => None,
        };
        Ok(Blended { rows: count, flops, end })
    }

    /// Returns the distances between the chunks' stored rows and the fresh rows, for keys and for values.
    fn distances(
        &self,
        runner: &Runner,
        fresh: &FreshKv,
        rows: Range<usize>,
    ) -> Result<(Distances, Distances)> {
        let stored = SlotMapping::concat(self.scratch.stored());
        let slots = stored.get(rows.start.min(stored.len())..rows.end.min(stored.len())).unwrap_or_default();
        // There is nothing to compare: the rows belong to the question, or all chunks already match full
        // attention.
        if slots.is_empty() {
            return Ok(Default::default());
        }
        let (arena, stream) = (runner.caches.sequences.first().arena(), runner.setup.stream.as_ref());
        let stored = KvRows::allocate(runner.setup.backend.as_ref(), arena, slots.len())?;
        stored.gather(stream, arena, self.layer, slots.into(), None)?;
        let distances = |without, fresh: &[f32], view: &TensorView| {
            if self.compared == without {
                return Ok(Distances::default());
            }
            Ok::<_, Error>(Distances::between(fresh, &read_f32(stream, view)?, slots.len()))
        };
        Ok((
            distances(DeviationOf::Values, &fresh.k, &stored.k)?,
            distances(DeviationOf::Keys, &fresh.v, &stored.v)?,
        ))
    }

    /// Copies the chosen tokens' rows of all layers before the checkpoint from scratch blocks to their final
    /// blocks.
    fn move_rows(&self, runner: &Runner, from: &SlotMapping, to: &WriteSlots) -> Result<()> {
        let (arena, stream) = (runner.caches.sequences.first().arena(), runner.setup.stream.as_ref());
        let rows = KvRows::allocate(runner.setup.backend.as_ref(), arena, from.len())?;
        for layer in 0..self.layer {
            rows.gather(stream, arena, layer, Arc::clone(from.slots()), None)?;
            stream.scatter(&Scatter::new(arena, layer, rows.k.clone(), rows.v.clone(), to))?;
        }
        Ok(())
    }

    /// Chooses the tokens that continue, and copies their rows to their final blocks.
    fn choose(&self, source: &BlendSource<'_>, assembled: &mut AssembledPrompt) -> Result<ChosenRows> {
        let mut found = self.found.clone();
        let sums = self.keys.plus(&self.values, self.chunk_rows());
        found.deviations = Some(TokenScores::new(self.scratch.by_chunk(assembled.chunks(), &sums)));
        let chosen = source.strategy.select(assembled.chunks(), &found);
        // Chunks that already match full attention have no rows here.
        let spans = assembled.chunks().iter().zip(chosen.chunks());
        let chosen = spans.map(|(span, tokens)| if span.is_full { Vec::new() } else { tokens.clone() });
        let chosen = TokenSelection::new(chosen);
        let rows = self.scratch.rows(&chosen);
        let recomputation =
            assembled.copy_on_write(source.prompt, &chosen, source.runner.caches.paged_cache()?.pool())?;
        source.runner.copy(&recomputation.copies)?;
        if !rows.is_empty() {
            let to = WriteSlots::concat(recomputation.inputs.iter().map(|input| &input.slots));
            self.move_rows(source.runner, &self.scratch.slots(&rows), &to)?;
        }
        let (first, count) = (self.chunk_rows() as u32, self.question.tokens.len() as u32);
        let mut batch = recomputation.inputs;
        batch.push(Context::scaled(source.scaling, assembled.segments()).of_question(&self.question));
        let rows = rows.into_iter().chain(first..first + count).collect();
        Ok(ChosenRows { rows, batch, done: 0, passed: 0, tokens: recomputation.tokens })
    }
}

impl Distances {
    /// Returns the squared distance between each of the first `rows` fresh rows and the corresponding stored
    /// row.
    fn between(fresh: &[f32], stored: &[f32], rows: usize) -> Self {
        let Some(width) = stored.len().checked_div(rows).filter(|&width| width > 0) else {
            return Self::default();
        };
        let fresh = &fresh[..stored.len()];
        let squares = fresh.iter().map(|x| f64::from(x * x)).sum();
        let distance = |(a, b): (&[f32], &[f32])| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
        };
        Self { rows: fresh.chunks(width).zip(stored.chunks(width)).map(distance).collect(), squares }
    }

    fn add(&mut self, more: Self) {
        self.rows.extend(more.rows);
        self.squares += more.squares;
    }

    /// Returns `‖fresh − stored‖² / mean ‖fresh‖²` for each of `rows` rows, summed over keys and values.
    fn plus(&self, other: &Self, rows: usize) -> Vec<f32> {
        let relative = |one: &Self, row: usize| {
            let mean = (one.squares / one.rows.len().max(1) as f64).max(f64::MIN_POSITIVE);
            one.rows.get(row).map_or(0.0, |distance| (distance / mean) as f32)
        };
        (0..rows).map(|row| relative(self, row) + relative(other, row)).collect()
    }
}

/// Returns the parts of the inputs that contain `rows`. Row indices count across all inputs.
fn pieces<'a>(
    inputs: impl Iterator<Item = &'a SequenceInput>,
    rows: Range<usize>,
) -> Result<Vec<SequenceInput>> {
    let (mut batch, mut before) = (Vec::new(), 0);
    for input in inputs {
        let len = input.tokens.len();
        let within = rows.start.max(before) - before..rows.end.clamp(before, before + len) - before;
        if within.start < within.end {
            batch.push(input.part(within)?);
        }
        before += len;
    }
    Ok(batch)
}
