//! Recomputation by deviation: all tokens are computed up to a checkpoint, and the chosen ones go on.
//!
//! Up to the checkpoint every chunk token and the question are computed under full attention, into scratch
//! blocks, piece by piece. At the checkpoint the fresh keys and values of each token are compared with the stored ones, and
//! the strategy chooses. The rows of the chosen tokens move to copy-on-write blocks, in which all other
//! tokens keep their stored KV. (CacheBlend, Yao et al., 2024.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use kvchunk::{
    AssembledPrompt, ChunkedPrompt, ContextScaling, DeviationCheck, DeviationOf, Findings, RecomputeStrategy,
    ScratchBlocks, TokenScores, TokenSelection,
};
use kvcore::{
    DType, Gather, LayerRopes, Logits, MemoryKind, Scatter, SequenceInput, SlotMapping, TensorView,
    WriteSlots, allocate_tensor,
};
use kvmodel::{FreshKv, KeptRows, Narrowed, Observer, PassMemory};

use crate::Engine;
use crate::chunked::with_context;
use crate::error::{Error, Result};
use crate::generate::{Context, last_row};

// Decision: docs/decisions/chunks.md#a-blend-chooses-once
/// A computation that blends fresh tokens into stored chunks, in passes of limited size.
///
/// ```text
/// compute a piece up to the checkpoint, keep its rows ─► … ─► choose ─► go on with the chosen rows of a piece ─► … ─► logits
/// ```
#[derive(Debug)]
pub(crate) struct Blend {
    of: DeviationOf,
    layer: usize,
    scratch: ScratchBlocks,
    question: SequenceInput,
    /// Evidence that was gathered before the blend.
    found: Findings,
    /// The pieces that were computed up to the checkpoint, in order, and the number of their rows.
    kept: VecDeque<(KeptRows, usize)>,
    done: usize,
    keys: Distances,
    values: Distances,
    /// The rows that go on, once they are chosen.
    chosen: Option<Chosen>,
}

/// The rows that go on behind the checkpoint.
#[derive(Debug)]
struct Chosen {
    /// Rows of the pieces together, ascending.
    rows: VecDeque<u32>,
    /// Their inputs, and the number of rows of these that have gone on.
    batch: Vec<SequenceInput>,
    done: usize,
    /// The number of rows of the pieces that have gone on.
    passed: u32,
    /// The number of chunk tokens among the rows.
    tokens: usize,
}

/// The outcome of a piece of a blend.
#[derive(Debug)]
pub(crate) struct Blended {
    /// The number of rows of the pass.
    pub(crate) rows: usize,
    pub(crate) flops: u64,
    /// The number of recomputed chunk tokens and the logits behind the question, once all is done.
    pub(crate) end: Option<(usize, Vec<f32>)>,
}

/// The squared distances of fresh rows from stored ones, and the sum of the squares of all fresh ones.
#[derive(Debug, Default)]
struct Distances {
    rows: Vec<f64>,
    squares: f64,
}

/// The request of a blend.
pub(crate) struct Blending<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) ropes: &'a LayerRopes,
    pub(crate) prompt: &'a ChunkedPrompt,
    pub(crate) strategy: &'a dyn RecomputeStrategy,
    pub(crate) scaling: ContextScaling,
}

impl Blend {
    /// Takes scratch blocks for all tokens. `question` has the slots where its rows stay.
    pub(crate) fn new(
        of: &Blending<'_>,
        assembled: &AssembledPrompt,
        question: SequenceInput,
        (check, found): (DeviationCheck, Findings),
    ) -> Result<Self> {
        Ok(Self {
            of: check.of,
            layer: check.layer,
            scratch: assembled.scratch(of.prompt, of.engine.pool()?)?,
            question,
            found,
            kept: VecDeque::new(),
            done: 0,
            keys: Distances::default(),
            values: Distances::default(),
            chosen: None,
        })
    }

    /// Returns the number of rows that are still to be computed, of those that are known.
    pub(crate) fn left(&self) -> usize {
        match &self.chosen {
            None => (self.chunk_rows() + self.question.tokens.len() - self.done).max(1),
            Some(chosen) => chosen.rows.len(),
        }
    }

    fn chunk_rows(&self) -> usize {
        self.scratch.inputs().iter().map(|input| input.tokens.len()).sum()
    }

    /// Computes the next piece, of at most `most` rows. After an error, nothing has changed.
    pub(crate) fn advance(
        &mut self,
        of: &Blending<'_>,
        assembled: &mut AssembledPrompt,
        most: usize,
        observer: &mut dyn Observer,
    ) -> Result<Blended> {
        let whole = self.chunk_rows() + self.question.tokens.len();
        if self.done < whole {
            return self.up_to_checkpoint(of, self.done..whole.min(self.done + most), observer);
        }
        if self.chosen.is_none() {
            self.chosen = Some(of.engine.profiler.span("checkpoint", || self.choose(of, assembled))?);
        }
        self.behind_checkpoint(of, most, observer)
    }

    /// Computes some rows up to the checkpoint, and compares those of chunks with what is stored.
    fn up_to_checkpoint(
        &mut self,
        of: &Blending<'_>,
        rows: Range<usize>,
        observer: &mut dyn Observer,
    ) -> Result<Blended> {
        let (engine, device, mut memory) = (of.engine, of.engine.device(), PassMemory::default());
        let question = with_context(&self.question, &Context::scaled(of.scaling, self.scratch.segments()));
        let all = self.scratch.inputs().iter().chain([&question]);
        let batch = parts(all, rows.clone())?;
        let mut pass = engine.model.begin(&device, of.ropes, &batch, &mut memory)?;
        pass.run_to(self.layer, observer)?;
        let fresh = pass.fresh()?;
        let (keys, values) = self.distances(of, &fresh, rows.clone())?;
        let (kept, flops) = pass.keep();
        self.keys.add(keys);
        self.values.add(values);
        self.kept.push_back((kept, rows.len()));
        self.done = rows.end;
        Ok(Blended { rows: rows.len(), flops, end: None })
    }

    /// Runs chosen rows of one piece through the layers behind the checkpoint.
    fn behind_checkpoint(
        &mut self,
        of: &Blending<'_>,
        most: usize,
        observer: &mut dyn Observer,
    ) -> Result<Blended> {
        let (engine, device, mut memory) = (of.engine, of.engine.device(), PassMemory::default());
        let Some(chosen) = &mut self.chosen else { return Err(Error::EmptyPrompt) };
        // Pieces without a chosen row are not needed any more.
        while let (Some((_, len)), Some(&next)) = (self.kept.front(), chosen.rows.front()) {
            if next < chosen.passed + *len as u32 {
                break;
            }
            chosen.passed += *len as u32;
            self.kept.pop_front();
        }
        let Some((piece, len)) = self.kept.front() else { return Err(Error::EmptyPrompt) };
        let end = chosen.passed + *len as u32;
        let of_piece = chosen.rows.iter().take_while(|&&row| row < end).take(most);
        let rows: Vec<u32> = of_piece.map(|row| row - chosen.passed).collect();
        let count = rows.len();
        let mut batch = parts(chosen.batch.iter(), chosen.done..chosen.done + count)?;
        let last = chosen.rows.len() == count;
        if let Some(input) = batch.last_mut().filter(|_| last) {
            input.logits = Logits::Last;
        }
        let pass = engine.model.resume(&device, of.ropes, piece, Narrowed { rows, batch }, &mut memory)?;
        let pass = pass.end(observer)?;
        chosen.done += count;
        chosen.rows.drain(..count);
        let flops = pass.flops;
        let end = last.then(|| Ok::<_, Error>((chosen.tokens, last_row(pass)?))).transpose()?;
        Ok(Blended { rows: count, flops, end })
    }

    /// Allocates rows for slots of the arena, `[rows, heads, dim]` of K and of V.
    fn rows(engine: &Engine, rows: usize) -> Result<(TensorView, TensorView)> {
        let arena = engine.caches.sequences().arena();
        let s = arena.layout().shape();
        let dtype = match s.format {
            kvcore::KvFormat::Dense(dtype) => dtype,
            _ => DType::F32,
        };
        let tensor = |heads, dim| {
            allocate_tensor(engine.backend.as_ref(), MemoryKind::Device, dtype, &[rows, heads, dim])
        };
        Ok((tensor(s.k_heads, s.k_dim)?, tensor(s.v_heads, s.v_dim)?))
    }

    fn gather(
        engine: &Engine,
        layer: usize,
        slots: &SlotMapping,
        to: &(TensorView, TensorView),
    ) -> Result<()> {
        let (arena, slots) = (engine.caches.sequences().arena().clone(), Arc::clone(slots.slots()));
        let (k, v) = to.clone();
        Ok(engine.stream.gather(&Gather { arena, layer, slots, k, v, rotation: None })?)
    }

    /// Returns the distances of the stored rows of chunks from the fresh ones, keys and values apart.
    fn distances(
        &self,
        of: &Blending<'_>,
        fresh: &FreshKv,
        rows: Range<usize>,
    ) -> Result<(Distances, Distances)> {
        let stored = SlotMapping::concat(self.scratch.stored());
        let slots = stored.get(rows.start.min(stored.len())..rows.end.min(stored.len())).unwrap_or_default();
        // The question, or chunks that are full attention's already.
        if slots.is_empty() {
            return Ok(Default::default());
        }
        let (engine, slots) = (of.engine, SlotMapping::from(slots.to_vec()));
        let rows = Self::rows(engine, slots.len())?;
        Self::gather(engine, self.layer, &slots, &rows)?;
        let host = |view: &TensorView| -> Result<Vec<f32>> {
            let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
            engine.stream.read(view, &mut bytes)?;
            Ok(widened(view.dtype(), &bytes))
        };
        let of = |without, fresh: &[f32], view: &TensorView| {
            if self.of == without {
                return Ok(Distances::default());
            }
            host(view).map(|stored| Distances::between(fresh, &stored, slots.len()))
        };
        Ok((of(DeviationOf::Values, &fresh.k, &rows.0)?, of(DeviationOf::Keys, &fresh.v, &rows.1)?))
    }

    /// Moves the chosen tokens' rows of all layers before the checkpoint from scratch to the blocks where
    /// they stay.
    fn move_rows(&self, engine: &Engine, from: &SlotMapping, to: &WriteSlots) -> Result<()> {
        let rows = Self::rows(engine, from.len())?;
        for layer in 0..self.layer {
            Self::gather(engine, layer, from, &rows)?;
            let (arena, slots) = (engine.caches.sequences().arena().clone(), to.clone());
            let (k, v) = rows.clone();
            engine.stream.scatter(&Scatter { arena, layer, k, v, slots, rotation: None })?;
        }
        Ok(())
    }

    /// Chooses the tokens that go on, and moves their rows to the blocks where they stay.
    fn choose(&self, of: &Blending<'_>, assembled: &mut AssembledPrompt) -> Result<Chosen> {
        let mut found = self.found.clone();
        let sums = self.keys.plus(&self.values, self.chunk_rows());
        found.deviations = Some(TokenScores::new(self.scratch.by_chunk(assembled.chunks(), &sums)));
        let chosen = of.strategy.select(assembled.chunks(), &found);
        // Chunks that are full attention's already have no rows here.
        let spans = assembled.chunks().iter().zip(chosen.chunks());
        let chosen = spans.map(|(span, tokens)| if span.is_full { Vec::new() } else { tokens.clone() });
        let chosen = TokenSelection::new(chosen);
        let rows = self.scratch.rows(&chosen);
        let anew = assembled.copy_on_write(of.prompt, &chosen, of.engine.pool()?)?;
        of.engine.copy(&anew.copies)?;
        if !rows.is_empty() {
            let to = WriteSlots::concat(anew.inputs.iter().map(|input| &input.slots));
            self.move_rows(of.engine, &self.scratch.slots(&rows), &to)?;
        }
        let (first, count) = (self.chunk_rows() as u32, self.question.tokens.len() as u32);
        let mut batch = anew.inputs;
        batch.push(with_context(&self.question, &Context::scaled(of.scaling, assembled.segments())));
        let rows = rows.into_iter().chain(first..first + count).collect();
        Ok(Chosen { rows, batch, done: 0, passed: 0, tokens: anew.tokens })
    }
}

impl Distances {
    /// Returns the squared distances of the first `rows` fresh rows from the stored ones.
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

    /// Returns `‖fresh − stored‖² / mean ‖fresh‖²` of each of `rows` rows, summed over both kinds.
    fn plus(&self, other: &Self, rows: usize) -> Vec<f32> {
        let of = |one: &Self, row: usize| {
            let mean = (one.squares / one.rows.len().max(1) as f64).max(f64::MIN_POSITIVE);
            one.rows.get(row).map_or(0.0, |distance| (distance / mean) as f32)
        };
        (0..rows).map(|row| of(self, row) + of(other, row)).collect()
    }
}

/// Returns some of the rows of inputs, which are numbered through all of them.
fn parts<'a>(
    inputs: impl Iterator<Item = &'a SequenceInput>,
    rows: Range<usize>,
) -> Result<Vec<SequenceInput>> {
    let (mut batch, mut before) = (Vec::new(), 0);
    for input in inputs {
        let len = input.tokens.len();
        let own = rows.start.max(before) - before..rows.end.clamp(before, before + len) - before;
        if own.start < own.end {
            batch.push(input.part(own)?);
        }
        before += len;
    }
    Ok(batch)
}

/// Converts rows from the device to f32.
pub(crate) fn widened(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F16 => {
            bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        DType::BF16 => {
            bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}
