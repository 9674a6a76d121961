//! Recomputation by deviation: all tokens are computed up to a checkpoint, and the chosen ones go on.
//!
//! Up to the checkpoint every chunk token and the question are computed under full attention, into scratch
//! blocks. At the checkpoint the fresh keys and values of each token are compared with the stored ones, and
//! the strategy chooses. The rows of the chosen tokens move to copy-on-write blocks, in which all other
//! tokens keep their stored KV. (CacheBlend, Yao et al., 2024.)

use std::sync::Arc;

use kvchunk::{
    AssembledPrompt, ChunkedPrompt, DeviationCheck, DeviationOf, Findings, RecomputeStrategy, ScratchBlocks,
    TokenScores, TokenSelection,
};
use kvcore::{
    DType, Gather, MemoryKind, Scatter, SequenceInput, SlotMapping, TensorView, WriteSlots, allocate_tensor,
};
use kvmodel::{Forward, FreshKv, Narrowed, Observer, PassMemory};

use crate::Engine;
use crate::chunked::with_context;
use crate::error::Result;
use crate::generate::{Asked, Context};

// Decision: docs/decisions/chunks.md#a-blend-chooses-once
/// A pass that blends fresh tokens into stored chunks.
pub(crate) struct Blend<'a> {
    engine: &'a Engine,
    strategy: &'a dyn RecomputeStrategy,
    of: DeviationOf,
    layer: usize,
    asked: &'a Asked<'a>,
    prompt: &'a ChunkedPrompt,
    assembled: &'a mut AssembledPrompt,
    scratch: ScratchBlocks,
    question: SequenceInput,
    /// What was found out before the pass.
    found: Findings,
}

impl<'a> Blend<'a> {
    pub(crate) fn new(
        engine: &'a Engine,
        asked: &'a Asked<'a>,
        prompt: &'a ChunkedPrompt,
        assembled: &'a mut AssembledPrompt,
        question: SequenceInput,
        (check, found): (DeviationCheck, Findings),
    ) -> Result<Self> {
        let strategy = asked.request.recompute.as_ref();
        let scratch = assembled.scratch(prompt, engine.pool()?)?;
        let (layer, of) = (check.layer, check.of);
        Ok(Self { engine, strategy, of, layer, asked, prompt, assembled, scratch, question, found })
    }

    /// Runs the pass: all rows up to the checkpoint, and after it the chosen ones. Returns the number of chunk
    /// tokens that went on, and the result of the pass.
    pub(crate) fn run(&mut self, observer: &mut dyn Observer) -> Result<(usize, Forward)> {
        let (engine, device, mut memory) = (self.engine, self.engine.device(), PassMemory::default());
        let mut batch = self.scratch.inputs().to_vec();
        batch.push(with_context(&self.question, &self.context(self.scratch.segments())));
        let mut pass = engine.model.begin(&device, &self.asked.ropes, &batch, &mut memory)?;
        pass.run_to(self.layer, observer)?;
        let fresh = pass.fresh()?;
        let (recomputed, narrowed) = engine.profiler.span("checkpoint", || self.narrow(&fresh))?;
        pass.narrow(narrowed)?;
        Ok((recomputed, pass.end(observer)?))
    }

    fn context(&self, segments: &Arc<[kvcore::Segment]>) -> Context {
        let scaling = &self.asked.request.scaling;
        Context { segments: scaling.apply(segments), groups: scaling.groups() }
    }

    /// Allocates rows for slots of the arena, `[rows, heads, dim]` of K and of V.
    fn rows(&self, rows: usize) -> Result<(TensorView, TensorView)> {
        let arena = self.engine.caches.sequences().arena();
        let s = arena.layout().shape();
        let dtype = match s.format {
            kvcore::KvFormat::Dense(dtype) => dtype,
            _ => DType::F32,
        };
        let tensor = |heads, dim| {
            allocate_tensor(self.engine.backend.as_ref(), MemoryKind::Device, dtype, &[rows, heads, dim])
        };
        Ok((tensor(s.k_heads, s.k_dim)?, tensor(s.v_heads, s.v_dim)?))
    }

    fn gather(&self, layer: usize, slots: &SlotMapping, to: &(TensorView, TensorView)) -> Result<()> {
        let (arena, slots) = (self.engine.caches.sequences().arena().clone(), Arc::clone(slots.slots()));
        let (k, v) = to.clone();
        Ok(self.engine.stream.gather(&Gather { arena, layer, slots, k, v, rotation: None })?)
    }

    /// Returns the distances of the stored rows from the fresh ones, chunk by chunk.
    fn deviations(&self, fresh: &FreshKv) -> Result<TokenScores> {
        let slots = SlotMapping::concat(self.scratch.stored());
        // Every chunk may be full attention's already.
        if slots.is_empty() {
            return Ok(TokenScores::new(self.scratch.by_chunk(self.assembled.chunks(), &[])));
        }
        let rows = self.rows(slots.len())?;
        self.gather(self.layer, &slots, &rows)?;
        let host = |view: &TensorView| -> Result<Vec<f32>> {
            let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
            self.engine.stream.read(view, &mut bytes)?;
            Ok(widened(view.dtype(), &bytes))
        };
        let mut sums = vec![0.0; slots.len()];
        if self.of != DeviationOf::Values {
            add_deviations(&mut sums, &fresh.k, &host(&rows.0)?);
        }
        if self.of != DeviationOf::Keys {
            add_deviations(&mut sums, &fresh.v, &host(&rows.1)?);
        }
        Ok(TokenScores::new(self.scratch.by_chunk(self.assembled.chunks(), &sums)))
    }

    /// Moves the chosen tokens' rows of all layers before the checkpoint from scratch to the blocks where
    /// they stay.
    fn move_rows(&self, from: &SlotMapping, to: &WriteSlots) -> Result<()> {
        let rows = self.rows(from.len())?;
        for layer in 0..self.layer {
            self.gather(layer, from, &rows)?;
            let (arena, slots) = (self.engine.caches.sequences().arena().clone(), to.clone());
            let (k, v) = rows.clone();
            self.engine.stream.scatter(&Scatter { arena, layer, k, v, slots, rotation: None })?;
        }
        Ok(())
    }

    /// Chooses the tokens that go on, and moves their rows to the blocks where they stay. Returns the number
    /// of chosen tokens, and all rows that go on.
    fn narrow(&mut self, fresh: &FreshKv) -> Result<(usize, Narrowed)> {
        self.found.deviations = Some(self.deviations(fresh)?);
        let chosen = self.strategy.select(self.assembled.chunks(), &self.found);
        // Chunks that are full attention's already have no rows here.
        let spans = self.assembled.chunks().iter().zip(chosen.chunks());
        let chosen = spans.map(|(span, tokens)| if span.is_full { Vec::new() } else { tokens.clone() });
        let chosen = TokenSelection::new(chosen);
        let rows = self.scratch.rows(&chosen);
        let anew = self.assembled.copy_on_write(self.prompt, &chosen, self.engine.pool()?)?;
        self.engine.copy(&anew.copies)?;
        if !rows.is_empty() {
            let from = self.scratch.slots(&rows);
            self.move_rows(&from, &WriteSlots::concat(anew.inputs.iter().map(|input| &input.slots)))?;
        }
        let question = fresh.rows - self.question.tokens.len()..fresh.rows;
        let mut batch = anew.inputs;
        batch.push(with_context(&self.question, &self.context(self.assembled.segments())));
        let rows = rows.into_iter().chain(question.map(|row| row as u32)).collect();
        Ok((anew.tokens, Narrowed { rows, batch }))
    }
}

/// Adds `‖fresh − stored‖² / mean ‖fresh‖²` of every row. `fresh` may have more rows.
fn add_deviations(sums: &mut [f32], fresh: &[f32], stored: &[f32]) {
    let Some(width) = stored.len().checked_div(sums.len()).filter(|&width| width > 0) else { return };
    let fresh = &fresh[..stored.len()];
    let mean = fresh.iter().map(|x| f64::from(x * x)).sum::<f64>() / sums.len() as f64;
    for ((sum, a), b) in sums.iter_mut().zip(fresh.chunks(width)).zip(stored.chunks(width)) {
        let distance: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        *sum += (distance / mean.max(f64::MIN_POSITIVE)) as f32;
    }
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
