//! A sequence without an engine: a prefill, then one token after another in the same memory.

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvcore::{
    Backend, BlockPool, KeyForm, KvArena, KvFormat, KvLayout, LayerRopes, Logits, MemoryKind, PagedKvCache,
    RankInfo, SequenceId, SequenceInput, SequenceStart, Stream,
};
use kvmodel::{ComputeDevice, DecodeMemory, Forward, Model, Profiler};

/// A sequence that a model continues, on one thread.
pub(crate) struct Greedy<'a> {
    model: &'a Model,
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    cache: PagedKvCache,
    id: SequenceId,
    ropes: LayerRopes,
    profiler: Profiler,
    memory: DecodeMemory,
    /// The input of the last decode step, whose memory is reused.
    input: Option<SequenceInput>,
    logits: Vec<f32>,
}

impl<'a> Greedy<'a> {
    pub(crate) fn new(
        model: &'a Model,
        format: impl Into<KvFormat>,
        longest: usize,
        block_size: usize,
    ) -> Self {
        let options = CpuOptions { threads: Some(1), ..CpuOptions::default() };
        let backend = CpuBackend::with_options(&options).unwrap();
        let blocks = longest.div_ceil(block_size);
        let shape = model.kv_extents(format).shape(&RankInfo::default(), blocks, block_size).unwrap();
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let mut cache = PagedKvCache::new(arena, BlockPool::new(0..blocks as u32).unwrap()).unwrap();
        Self {
            model,
            stream: backend.stream().unwrap(),
            id: cache.create(SequenceStart::default()).unwrap(),
            cache,
            backend,
            ropes: model.ropes(longest).unwrap(),
            profiler: Profiler::disabled(),
            memory: DecodeMemory::new(0),
            input: None,
            logits: Vec::new(),
        }
    }

    /// Removes all tokens, but keeps the memory.
    pub(crate) fn restart(&mut self) {
        self.cache.truncate(self.id, 0).unwrap();
    }

    /// Appends tokens to the sequence and computes them. Returns the last token's logits.
    pub(crate) fn prefill(&mut self, tokens: &[u32]) -> &[f32] {
        let start = self.cache.len(self.id).unwrap();
        let slots = self.cache.grow(self.id, tokens.len()).unwrap();
        let segments = [self.cache.segment(self.id).unwrap()];
        let input = SequenceInput::new(tokens.to_vec(), start, start as i64, slots, segments);
        let batch = [input.with_logits(Logits::Last)];
        let device = ComputeDevice {
            backend: self.backend.as_ref(),
            stream: self.stream.as_ref(),
            arenas: std::slice::from_ref(self.cache.arena()),
            keys: KeyForm::default(),
            profiler: &self.profiler,
        };
        let pass = self.model.forward(&device, &self.ropes, &batch, &mut ()).unwrap();
        self.keep(pass)
    }

    /// Appends one token and computes it in a decode step. Returns its logits.
    pub(crate) fn step(&mut self, token: u32) -> &[f32] {
        let at = self.cache.len(self.id).unwrap();
        let mut input = self.input.take().unwrap_or_else(|| {
            let none = kvcore::WriteSlots::default();
            let segments = [self.cache.segment(self.id).unwrap()];
            SequenceInput::new(vec![0], at, at as i64, none, segments).with_logits(Logits::Last)
        });
        self.cache.grow_batch(&[(self.id, 1)], &mut input.slots).unwrap();
        input.tokens[0] = token;
        (input.logical_start, input.position_start) = (at, at as i64);
        Arc::make_mut(&mut input.segments)[0] = self.cache.segment(self.id).unwrap();
        let device = ComputeDevice {
            backend: self.backend.as_ref(),
            stream: self.stream.as_ref(),
            arenas: std::slice::from_ref(self.cache.arena()),
            keys: KeyForm::default(),
            profiler: &self.profiler,
        };
        let (batch, logits) = (std::slice::from_ref(&input), std::mem::take(&mut self.logits));
        let pass = self.model.decode(&device, &self.ropes, batch, &mut self.memory, logits).unwrap();
        self.input = Some(input);
        self.keep(pass)
    }

    fn keep(&mut self, pass: Forward) -> &[f32] {
        self.logits = pass.logits.unwrap().into_last();
        &self.logits
    }
}

/// Returns the token with the largest logit.
pub(crate) fn likeliest(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

/// Returns the logits from which each of the next `tokens` tokens is chosen.
pub(crate) fn answer(model: &Model, prompt: &[u32], tokens: usize) -> Vec<Vec<f32>> {
    let mut sequence = Greedy::new(model, kvcore::DType::F32, prompt.len() + tokens, 16);
    let mut answer = vec![sequence.prefill(prompt).to_vec()];
    while let Some(last) = answer.last().filter(|_| answer.len() < tokens) {
        let logits = sequence.step(likeliest(last)).to_vec();
        answer.push(logits);
    }
    answer
}
