//! A batch of sequences that decode together on a device.

use std::sync::Arc;

use kvcore::{
    Backend, BlockOrder, KeyForm, KvArena, KvLayout, Logits, MemoryKind, PagedKvCache, RankInfo, SequenceId,
    SequenceInput, SequenceStart,
};
use kvmodel::{ComputeDevice, DecodeMemory, Model, Profiler};

/// Sequences that decode together.
pub(crate) struct Batch<'a> {
    model: &'a Model,
    backend: Arc<dyn Backend>,
    cache: PagedKvCache,
    sequences: Vec<SequenceId>,
    pub(crate) memory: DecodeMemory,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(model: &'a Model, backend: &Arc<dyn Backend>, sequences: usize, graphs: usize) -> Self {
        let blocks = 4 * sequences.max(16) as u32;
        let shape =
            model.kv_extents(kvcore::DType::F32).shape(&RankInfo::default(), blocks as usize, 4).unwrap();
        let layout =
            Arc::new(KvLayout::new(kvcore::KvShape { order: BlockOrder::TokenMajor, ..shape }).unwrap());
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let pool = kvcore::BlockPool::new(0..blocks).unwrap();
        let mut cache = PagedKvCache::new(arena, pool).unwrap();
        let create = |_| cache.create(SequenceStart::default()).unwrap();
        let sequences = (0..sequences).map(create).collect();
        let memory = DecodeMemory::new(graphs);
        Self { model, backend: Arc::clone(backend), cache, sequences, memory }
    }

    /// Runs a step that computes one token for each sequence. Returns the bits of the logits.
    pub(crate) fn step(&mut self, stream: &dyn kvcore::Stream, number: u32) -> Vec<u32> {
        let mut batch = Vec::new();
        for (&sequence, first) in self.sequences.iter().zip(0u32..) {
            let at = self.cache.len(sequence).unwrap();
            let slots = self.cache.grow(sequence, 1).unwrap();
            let segments: Arc<[_]> = [self.cache.segment(sequence).unwrap()].into();
            let token = (first * 7 + number * 3) % self.model.config().vocab_size as u32;
            let input = SequenceInput::new(vec![token], at, at as i64, slots, segments);
            batch.push(input.with_logits(Logits::Last));
        }
        let device = ComputeDevice {
            backend: self.backend.as_ref(),
            stream,
            arenas: std::slice::from_ref(self.cache.arena()),
            keys: KeyForm::Rotated,
            profiler: &Profiler::disabled(),
        };
        let ropes = self.model.ropes(32).unwrap();
        let forward = self.model.decode(&device, &ropes, &batch, &mut self.memory, Vec::new()).unwrap();
        let logits = forward.logits.unwrap();
        assert_eq!(logits.rows(), self.sequences.len(), "rows of padding have no logits");
        for (&sequence, input) in self.sequences.iter().zip(&batch) {
            self.cache.commit(sequence, &input.tokens).unwrap();
        }
        logits.values().iter().map(|x| x.to_bits()).chain([forward.flops as u32]).collect()
    }
}
