//! Unrotated keys: at every position where they are used, they match the keys of a fresh prefill at that
//! position bit for bit.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, KeyForm, KvArena,
    KvFormat, KvLayout, KvShape, MemoryKind, QueryRow, Rope, RopeConfig, RopeScaling, Scatter, Segment,
    Stream, TensorView, WriteSlots, allocate_tensor,
};
use rstest::rstest;

const TOKENS: usize = 23;
const HEADS: usize = 2;
const DIM: usize = 16;

struct Setup {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    rope: Arc<Rope>,
}

fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 101) as f32 * 0.618).sin()).collect()
}

impl Setup {
    fn new() -> Self {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.138_629_4,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 64,
            truncate: true,
        };
        let config = RopeConfig { rotary_dim: 12, scaling, ..RopeConfig::new(DIM, 10_000.0) };
        let backend = CpuBackend::new();
        let stream = backend.stream().unwrap();
        Self { backend, stream, rope: Arc::new(Rope::new(config, 1 << 17).unwrap()) }
    }

    fn rows(&self, rows: usize, heads: usize, seed: usize) -> TensorView {
        let shape = [rows, heads, DIM];
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &shape).unwrap();
        self.stream.write(&view, bytemuck::cast_slice(&values(seed, rows * heads * DIM))).unwrap();
        view
    }

    /// Returns an arena with the test's keys and values. Keys are rotated to positions starting at `start`,
    /// or stored unrotated if there is none.
    fn filled(&self, format: KvFormat, start: Option<i64>) -> KvArena {
        let shape = KvShape {
            num_layers: 1,
            num_blocks: 6,
            block_size: 4,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format,
            order: BlockOrder::TokenMajor,
        };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let arena = KvArena::allocate(self.backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let (k, v) = (self.rows(TOKENS, HEADS, 1), self.rows(TOKENS, HEADS, 2));
        if let Some(start) = start {
            let positions = (0..TOKENS as i64).map(|i| start + i).collect();
            let rope = Arc::clone(&self.rope);
            self.stream.rope(&ApplyRope { rows: k.clone(), positions, rope }).unwrap();
        }
        let slots = (0..TOKENS as i64).collect::<Vec<_>>();
        self.stream
            .scatter(&Scatter {
                arena: arena.clone(),
                layer: 0,
                k,
                v,
                slots: WriteSlots::unchecked(slots),
                rotation: None,
            })
            .unwrap();
        arena
    }

    /// Returns the output of a query that directly follows the tokens.
    fn attend(&self, arena: KvArena, keys: KeyForm, stored: i64, used: i64) -> Vec<f32> {
        let blocks: Arc<[BlockId]> = (0..6).map(BlockId).collect();
        let segment = Segment::new(blocks, TOKENS, 0, stored).at_offset(used - stored);
        let out = self.rows(1, 2 * HEADS, 4);
        let attend = Attend {
            arena,
            layer: 0,
            q: self.rows(1, 2 * HEADS, 3),
            rope: Some(Arc::clone(&self.rope)),
            keys,
            work: Arc::new(AttendWork::new(
                [QueryRow { logical: TOKENS, position: used + TOKENS as i64 }],
                [AttendRows::new(0..1, [segment])],
            )),
            scale: 0.25,
            window: None,
            softcap: None,
            out: out.clone(),
            lse: None,
        };
        self.stream.attend(&attend).unwrap();
        let mut host = vec![0.0; 2 * HEADS * DIM];
        self.stream.read(&out, bytemuck::cast_slice_mut(&mut host)).unwrap();
        host
    }
}

#[rstest]
fn reuse_is_bit_for_bit_a_fresh_prefill(#[values(0, 1, 777, 100_000)] used: i64) {
    let s = Setup::new();
    let f32 = KvFormat::Dense(DType::F32);
    let fresh = s.attend(s.filled(f32, Some(used)), KeyForm::Rotated, used, used);
    let reused = s.attend(s.filled(f32, None), KeyForm::Unrotated, 0, used);
    assert_eq!(reused, fresh);
    if used > 0 {
        let turned = s.attend(s.filled(f32, Some(0)), KeyForm::Rotated, 0, used);
        assert_ne!(turned, fresh, "a turned query gives the same to rounding only");
        assert!(turned.iter().zip(&fresh).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}

/// For formats that round, compares with a prefill that stores its keys unrotated.
#[rstest]
fn in_every_format_the_place_of_storing_leaves_no_trace(
    #[values("f16", "bf16", "int8:8", "int4:8", "fp8-e4m3")] format: &str,
    #[values(5, 4096)] used: i64,
) {
    let s = Setup::new();
    let arena = s.filled(format.parse().unwrap(), None);
    let fresh = s.attend(arena.clone(), KeyForm::Unrotated, used, used);
    for stored in [0, 9, 60_000] {
        assert_eq!(s.attend(arena.clone(), KeyForm::Unrotated, stored, used), fresh);
    }
    let rotated = s.attend(s.filled(format.parse().unwrap(), Some(0)), KeyForm::Rotated, 0, used);
    assert_ne!(rotated, fresh, "what was rounded after its rotation is not the same");
}
