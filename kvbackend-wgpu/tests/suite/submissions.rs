//! The amount of work per submission, and the number of bytes copied between device and host.

use std::sync::Arc;

use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, CounterSnapshot, DType, KeyForm,
    KvArena, KvShape, MemoryKind, QueryRow, Rope, RopeConfig, Scatter, Segment, Stream, TensorView,
    WriteSlots, allocate_tensor,
};

use crate::common::{arena, noise, opened, upload};

const HEADS: usize = 4;
const DIM: usize = 64;
const LAYERS: usize = 12;
const TOKENS: usize = 32;

/// The rows of a prompt, and a cache for them.
struct PromptRows {
    backend: Arc<WgpuBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    rope: Arc<Rope>,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    out: TensorView,
}

impl PromptRows {
    /// Opens a separate device, because a shared device's counters also count the work of other tests.
    fn new() -> Option<Self> {
        let backend = opened(&WgpuOptions::default())?;
        let shape = KvShape {
            num_layers: LAYERS,
            num_blocks: TOKENS / 16,
            block_size: 16,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::BF16.into(),
            order: BlockOrder::TokenMajor,
        };
        let rows =
            || allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[TOKENS, HEADS, DIM]);
        Some(Self {
            stream: backend.stream().unwrap(),
            arena: arena(backend.as_ref(), shape),
            rope: Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 1024).unwrap()),
            q: rows().unwrap(),
            k: rows().unwrap(),
            v: rows().unwrap(),
            out: rows().unwrap(),
            backend,
        })
    }

    /// Returns the attention work of all rows.
    fn work() -> Arc<AttendWork> {
        let blocks = (0..TOKENS as u32 / 16).map(BlockId).collect::<Vec<_>>();
        Arc::new(AttendWork::new(
            (0..TOKENS).map(|i| QueryRow { logical: i, position: i as i64 }).collect::<Vec<_>>(),
            [AttendRows::new(0..TOKENS, [Segment::new(blocks.into(), TOKENS, 0, 0)])],
        ))
    }

    /// Enqueues the rotation of keys, the storage of keys and values, and attention over them.
    fn enqueue(&self, layer: usize, work: &Arc<AttendWork>) {
        let (k, v) = (self.k.clone(), self.v.clone());
        let positions = (0..TOKENS as i64).collect();
        self.stream.rope(&ApplyRope { rows: k.clone(), positions, rope: Arc::clone(&self.rope) }).unwrap();
        let slots = (0..TOKENS as i64).collect::<Vec<_>>();
        self.stream
            .scatter(&Scatter {
                arena: self.arena.clone(),
                layer,
                k,
                v,
                slots: WriteSlots::unchecked(slots),
                rotation: None,
            })
            .unwrap();
        let attend = Attend {
            arena: self.arena.clone(),
            layer,
            q: self.q.clone(),
            rope: Some(Arc::clone(&self.rope)),
            keys: KeyForm::Rotated,
            work: Arc::clone(work),
            scale: 0.125,
            window: None,
            softcap: None,
            out: self.out.clone(),
            lse: None,
        };
        self.stream.attend(&attend).unwrap();
    }

    fn counted(&self, work: impl FnOnce()) -> CounterSnapshot {
        self.stream.synchronize().unwrap();
        let before = self.backend.counters();
        work();
        self.stream.synchronize().unwrap();
        self.backend.counters().since(&before)
    }
}

#[test]
fn many_layers_go_in_one_submission() {
    let Some(prompt) = PromptRows::new() else { return };
    let work = PromptRows::work();
    prompt.enqueue(0, &work); // the first call makes tables of angles
    let counted = prompt.counted(|| (0..LAYERS).for_each(|layer| prompt.enqueue(layer, &work)));
    assert_eq!((counted.submissions, counted.attend_calls), (1, LAYERS as u64));
    assert_eq!((counted.host_write_bytes, counted.host_read_bytes), (0, 0));
}

#[test]
fn segments_and_block_tables_are_uploaded_once_a_step() {
    let Some(prompt) = PromptRows::new() else { return };
    let step = |reads: bool| {
        let work = PromptRows::work();
        let mut host = vec![0; TOKENS * HEADS * DIM * 4];
        for layer in 0..LAYERS {
            prompt.enqueue(layer, &work);
            if reads {
                prompt.stream.read(&prompt.out, &mut host).unwrap();
            }
        }
    };
    let once = prompt.counted(|| prompt.enqueue(0, &PromptRows::work())).plan_bytes;
    assert!(once > 4 * TOKENS as u64, "{once} bytes hold no record of each row");
    assert_eq!(prompt.counted(|| step(false)).plan_bytes, once);
    assert_eq!(prompt.counted(|| step(true)).plan_bytes, once);
    // There are more steps than a stream keeps plans, so the plans' buffers are reused.
    assert_eq!(prompt.counted(|| (0..10).for_each(|_| step(true))).plan_bytes, 10 * once);
}

#[test]
fn a_layer_that_the_host_feeds_and_reads_is_one_submission() {
    let Some(prompt) = PromptRows::new() else { return };
    let work = PromptRows::work();
    prompt.enqueue(0, &work);
    let mut host = noise(1, TOKENS * HEADS * DIM * 4);
    let bytes = host.len() as u64;
    let counted = prompt.counted(|| {
        for layer in 0..LAYERS {
            for view in [&prompt.q, &prompt.k, &prompt.v] {
                prompt.stream.write(view, &host).unwrap();
            }
            prompt.enqueue(layer, &work);
            prompt.stream.read(&prompt.out, &mut host).unwrap();
        }
    });
    let layers = LAYERS as u64;
    assert_eq!(counted.submissions, layers);
    assert_eq!((counted.host_write_bytes, counted.host_read_bytes), (3 * layers * bytes, layers * bytes));
}

#[test]
fn large_writes_wait_for_the_work_that_follows_and_not_for_ever() {
    let Some(prompt) = PromptRows::new() else { return };
    let large = noise(2, 8 << 20);
    let view = upload(prompt.backend.as_ref(), DType::U8, &[large.len()], &large);
    let writes = |n: usize| {
        prompt.counted(|| (0..n).for_each(|_| prompt.stream.write(&view, &large).unwrap())).submissions
    };
    assert_eq!(writes(3), 1);
    // The queue must not keep 128 MiB.
    assert_eq!(writes(16), 2);
}
