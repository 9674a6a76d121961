//! Helpers that create small arenas and tensors of consecutive numbers, and read their contents.

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvcore::{
    Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, Stream, TensorView, allocate_tensor,
};

pub(crate) const HEADS: usize = 2;
pub(crate) const DIM: usize = 3;

pub(crate) struct Memory {
    pub(crate) backend: Arc<CpuBackend>,
    pub(crate) stream: Arc<dyn Stream>,
}

impl Memory {
    pub(crate) fn new(execution: Execution) -> Self {
        let backend = CpuBackend::with_execution(execution);
        let stream = backend.stream().unwrap();
        Self { backend, stream }
    }

    pub(crate) fn arena(&self, num_blocks: usize, block_size: usize) -> KvArena {
        let shape = KvShape {
            num_layers: 2,
            num_blocks,
            block_size,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::F32.into(),
            order: BlockOrder::HeadMajor,
        };
        KvArena::allocate(self.backend.as_ref(), MemoryKind::System, Arc::new(KvLayout::new(shape).unwrap()))
            .unwrap()
    }

    pub(crate) fn tensor(&self, shape: &[usize], first: f32) -> TensorView {
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::System, DType::F32, shape).unwrap();
        let bytes: Vec<u8> = (0..view.len()).flat_map(|i| (first + i as f32).to_le_bytes()).collect();
        self.stream.write(&view, &bytes).unwrap();
        view
    }

    pub(crate) fn values(&self, view: &TensorView) -> Vec<f32> {
        let mut bytes = vec![0; view.len() * 4];
        self.stream.read(view, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}
