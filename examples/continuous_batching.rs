//! Continuous batching over a paged cache: `cargo run --release --example continuous_batching`.
//!
//! Requests start and end while others run. They share the blocks of common prefixes. When blocks run out,
//! the last request frees its blocks and waits. Tokens that a draft got wrong are rolled back. A table of
//! random rows replaces the weights of a model; the rest is what an engine does in each step. At the end,
//! every answer equals the answer that its request gets alone.

use std::collections::VecDeque;
use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvcore::{
    Attend, Backend, BatchRows, BlockPool, DType, Error, KeyScope, KvArena, KvExtents, MemoryKind,
    PagedCacheConfig, PagedKvCache, PromptKeys, RankInfo, Result, Rope, RopeConfig, Scatter, SequenceId,
    SequenceInput, StepBatch, Stream, TensorView, WriteSlots, allocate_tensor,
};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const DIM: usize = 16;
const VOCABULARY: usize = 64;
/// The maximum number of tokens per request in a step. A longer prompt is computed in pieces.
const PIECE: usize = 32;
/// The number of tokens to guess ahead of an answer.
const DRAFT: usize = 3;
const ANSWER: usize = 40;

/// A device, and a table of rows as the model.
struct Model {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    rope: Arc<Rope>,
    table: Vec<f32>,
}

impl Model {
    fn rows(&self, values: &[f32]) -> Result<TensorView> {
        let shape = [values.len() / (HEADS * DIM), HEADS, DIM];
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &shape)?;
        self.stream.write(&view, bytemuck::cast_slice(values))?;
        Ok(view)
    }

    fn row_of(&self, token: u32) -> &[f32] {
        &self.table[token as usize % VOCABULARY * HEADS * DIM..][..HEADS * DIM]
    }

    /// Runs a pass over the rows of a batch. Returns the most likely next token after each row.
    fn forward(&self, arena: &KvArena, rows: &BatchRows) -> Result<Vec<u32>> {
        let mut x: Vec<f32> = rows.tokens().iter().flat_map(|&t| self.row_of(t)).copied().collect();
        let mut v: Vec<f32> = rows.tokens().iter().flat_map(|&t| self.row_of(t + 1)).copied().collect();
        for layer in 0..LAYERS {
            let (k, out) = (self.rows(&x)?, self.rows(&x)?);
            let scatter = Scatter::new(arena, layer, k.clone(), self.rows(&v)?, rows.slots());
            self.stream.scatter(&scatter.rotated(&self.rope, rows.positions()))?;
            let attend = Attend::new(arena, layer, k, rows.work(), out.clone());
            self.stream.attend(&attend.rotating(&self.rope))?;
            self.stream.read(&out, bytemuck::cast_slice_mut(&mut x))?;
            v.clone_from(&x);
        }
        let score = |x: &[f32], token: u32| x.iter().zip(self.row_of(token)).map(|(a, b)| a * b).sum::<f32>();
        let likeliest =
            |x: &[f32]| (0..VOCABULARY as u32).max_by(|&a, &b| score(x, a).total_cmp(&score(x, b)));
        Ok(x.chunks(HEADS * DIM).filter_map(likeliest).collect())
    }
}

/// A request: the prompt, followed by the answer so far.
struct Request {
    number: usize,
    prompt: usize,
    tokens: Vec<u32>,
    /// Keys of the prompt's blocks, computed once even if the request starts again.
    keys: PromptKeys,
    /// The number of tokens in the cache.
    computed: usize,
}

impl Request {
    /// Returns the tokens of the next step: a piece of the prompt, or the answer's last token and a guess,
    /// copied from what followed that token earlier.
    fn next(&self) -> Vec<u32> {
        let left = &self.tokens[self.computed..];
        let mut next = left[..left.len().min(PIECE)].to_vec();
        if left.len() == 1 && self.tokens.len() > self.prompt {
            let before = &self.tokens[..self.computed];
            let seen = before.iter().rposition(|token| *token == left[0]).map_or(self.computed, |at| at + 1);
            next.extend(before[seen..].iter().take(DRAFT));
        }
        next
    }
}

/// Answers all prompts, with at most `max_memory` bytes for keys and values. Returns the answers and a
/// summary of the run.
fn serve(model: &Model, max_memory: usize, prompts: &[Vec<u32>]) -> Result<(Vec<Vec<u32>>, String)> {
    let format = DType::F32.into();
    let (num_layers, k_heads, v_heads, k_dim, v_dim) = (LAYERS, HEADS, HEADS, DIM, DIM);
    let extents = KvExtents { num_layers, k_heads, v_heads, k_dim, v_dim, max_positions: 1024, format };
    // Four blocks are reserved for running requests; new requests may not take them.
    let config = PagedCacheConfig { max_memory, watermark: 4, ..PagedCacheConfig::default() };
    let layout = Arc::new(config.layout(&extents, &RankInfo::default())?);
    let arena = KvArena::allocate(model.backend.as_ref(), MemoryKind::Device, layout)?;
    let pool = BlockPool::with_config(0..arena.layout().shape().num_blocks as u32, config.pool())?;
    let mut cache = PagedKvCache::new(arena, pool)?;
    let root = KeyScope::new("table", b"its digest").tenant_salt(b"alice").root();
    let begin = |(number, prompt): (usize, &Vec<u32>)| {
        let keys = PromptKeys::new(root, prompt, cache.kv_pool().block_size());
        Request { number, prompt: prompt.len(), tokens: prompt.clone(), keys, computed: 0 }
    };
    let mut waiting: VecDeque<_> = prompts.iter().enumerate().map(begin).collect();
    let (mut running, mut slots): (Vec<(SequenceId, Request)>, _) = (Vec::new(), WriteSlots::default());
    let (mut steps, mut preempted, mut found, mut accepted) = (0, 0, 0, 0);
    let (mut answers, mut rows) = (vec![Vec::new(); prompts.len()], BatchRows::default());
    while !running.is_empty() || !waiting.is_empty() {
        // Allocates slots for all running requests. If blocks run out, the last request is preempted and
        // starts again later.
        let mut next: Vec<Vec<u32>> = running.iter().map(|(_, run)| run.next()).collect();
        let growth = |running: &[(SequenceId, Request)], next: &[Vec<u32>]| -> Vec<_> {
            running.iter().zip(next).map(|((id, _), next)| (*id, next.len())).collect()
        };
        while let Err(error) = cache.grow_batch(&growth(&running, &next), &mut slots) {
            let (Error::OutOfBlocks { .. }, 2..) = (&error, running.len()) else { return Err(error) };
            next.pop();
            for (id, last) in running.drain(running.len() - 1..) {
                cache.free(id)?;
                waiting.push_front(Request { computed: 0, ..last });
            }
            preempted += 1;
        }
        let input = |((id, run), next): (&(SequenceId, Request), &Vec<u32>)| {
            let (at, own) = (run.computed, [cache.segment(*id)?]);
            Ok(SequenceInput::new(next.clone(), at, at as i64, WriteSlots::default(), own))
        };
        let mut inputs = running.iter().zip(&next).map(input).collect::<Result<Vec<_>>>()?;
        // Waiting requests are admitted while there is room for a first piece after their cached tokens. Each
        // request has its own slots.
        while let Some(mut new) = waiting.pop_front() {
            new.keys.extend(&new.tokens[new.keys.tokens().len()..]);
            let (id, cached, own) = match cache.admit(&new.keys, PIECE) {
                Ok(admitted) => admitted,
                Err(Error::OutOfBlocks { .. }) if !running.is_empty() => {
                    waiting.push_front(new);
                    break;
                }
                Err(error) => return Err(error),
            };
            (new.computed, found) = (cached, found + cached);
            next.push(new.tokens[cached..][..own.len()].to_vec());
            let piece = next[running.len()].clone();
            inputs.push(SequenceInput::new(piece, cached, cached as i64, own, [cache.segment(id)?]));
            running.push((id, new));
        }
        // One pass for all requests.
        rows.fill(StepBatch { inputs: &inputs, slots: std::slice::from_ref(&slots) })?;
        let chosen = model.forward(cache.arena(), &rows)?;
        steps += 1;
        let mut row = 0;
        for ((id, run), fed) in running.iter_mut().zip(&next) {
            let following = &chosen[row..row + fed.len()];
            row += fed.len();
            let known = fed.len().min(run.tokens.len() - run.computed);
            // A drafted token is kept if it equals the model's choice after the token before it.
            let kept = known + (known..fed.len()).take_while(|&i| fed[i] == following[i - 1]).count();
            accepted += kept - known;
            cache.truncate(*id, run.computed + kept)?;
            cache.commit(*id, &fed[..kept])?;
            run.computed += kept;
            if run.computed >= run.tokens.len() {
                run.tokens.extend_from_slice(&following[known - 1..kept]);
            }
        }
        for (id, run) in running.extract_if(.., |(_, run)| run.tokens.len() >= run.prompt + ANSWER) {
            answers[run.number] = run.tokens[run.prompt..][..ANSWER].to_vec();
            cache.free(id)?;
        }
    }
    cache.pool().check_invariants().map_err(|reason| Error::Device { backend: "pool", reason })?;
    let summary = format!(
        "{steps} steps; {preempted} preempted, {found} tokens found in the cache, {accepted} guesses accepted"
    );
    Ok((answers, summary))
}

fn main() -> Result<()> {
    let backend = CpuBackend::new();
    let model = Model {
        stream: backend.stream()?,
        rope: Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 1024)?),
        table: (0..VOCABULARY * HEADS * DIM).map(|i| (i as f32 * 12.9898).sin()).collect(),
        backend,
    };
    // Prompts share forty tokens, followed by up to thirty different ones.
    let own = |i: usize| (0..8 + 2 * i).map(move |j| (5 + i * 11 + j * 7) % VOCABULARY);
    let prompts: Vec<Vec<u32>> =
        (0..12).map(|i| (0..40).chain(own(i)).map(|token| token as u32).collect()).collect();
    let memory = 24 * 16 * LAYERS * 2 * HEADS * DIM * 4;
    let (answers, summary) = serve(&model, memory, &prompts)?;
    println!("{} requests in {summary}", prompts.len());
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(serve(&model, memory, std::slice::from_ref(prompt))?.0[0], *answer);
    }
    println!("every answer equals the answer that its request gets alone");
    Ok(())
}
