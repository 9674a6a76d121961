//! The caches of `kvcore` on real memory: static and paged hold the same bytes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvcore::kernels::Gather;
use kvcore::{
    Backend, BlockOrder, BlockPool, DType, Error, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
    SequenceStart, StaticKvCache, Stream, TensorView, allocate_tensor,
};

const HEADS: usize = 2;
const DIM: usize = 3;

struct Memory {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
}

impl Memory {
    fn new() -> Self {
        let backend = CpuBackend::new();
        let stream = backend.stream().unwrap();
        Self { backend, stream }
    }

    fn arena(&self, num_blocks: usize, block_size: usize) -> KvArena {
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

    fn tensor(&self, shape: &[usize], first: f32) -> TensorView {
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::System, DType::F32, shape).unwrap();
        let bytes: Vec<u8> = (0..view.len()).flat_map(|i| (first + i as f32).to_le_bytes()).collect();
        self.stream.write(&view, &bytes).unwrap();
        view
    }

    fn values(&self, view: &TensorView) -> Vec<f32> {
        let mut bytes = vec![0; view.len() * 4];
        self.stream.read(view, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// Element `[batch, head, token, 0]` of a head-major view, read one by one.
fn at(m: &Memory, view: &TensorView, index: [usize; 3]) -> f32 {
    let row = view.select(0, index[0]).unwrap().select(0, index[1]).unwrap().select(0, index[2]).unwrap();
    m.values(&row)[0]
}

#[test]
fn updates_return_views_of_everything_so_far() {
    let m = Memory::new();
    let mut cache = StaticKvCache::new(m.arena(2, 8)).unwrap();
    let first = m.tensor(&[2, HEADS, 3, DIM], 0.0);
    let (k, _) = cache.update(m.stream.as_ref(), 1, &first, &first, &[0, 0]).unwrap();
    assert_eq!(k.shape(), [2, HEADS, 3, DIM]);
    let second = m.tensor(&[2, HEADS, 2, DIM], 100.0);
    // entry 1 goes back one token, entry 0 goes on
    let (k, v) = cache.update(m.stream.as_ref(), 1, &second, &second, &[3, 2]).unwrap();
    assert_eq!((k.shape(), v.shape()), (&[2, HEADS, 5, DIM][..], &[2, HEADS, 5, DIM][..]));
    assert_eq!(
        (cache.entry_len(1, 0).unwrap(), cache.entry_len(1, 1).unwrap(), cache.entry_len(0, 0).unwrap()),
        (5, 4, 0)
    );
    for (view, batch, head, token, expected) in [
        (&k, 0, 1, 2, (HEADS - 1) as f32 * 9.0 + 6.0),
        (&k, 0, 0, 3, 100.0),
        (&v, 1, 0, 1, 21.0),
        (&v, 1, 0, 2, 100.0 + 12.0),
        (&v, 1, 1, 3, 100.0 + 12.0 + 6.0 + 3.0),
    ] {
        assert_eq!(at(&m, view, [batch, head, token]), expected, "{batch} {head} {token}");
    }
    assert!(k.storage().address() == cache.arena().k().address(), "a view, not a copy");
}

#[test]
fn wrong_updates_change_nothing() {
    let m = Memory::new();
    let mut cache = StaticKvCache::new(m.arena(2, 4)).unwrap();
    let good = m.tensor(&[2, HEADS, 3, DIM], 1.0);
    cache.update(m.stream.as_ref(), 0, &good, &good, &[0, 0]).unwrap();
    let before = m.values(
        &TensorView::new(Arc::clone(cache.arena().k()), DType::F32, &[2 * 2 * HEADS * 4 * DIM]).unwrap(),
    );
    let long = m.tensor(&[2, HEADS, 2, DIM], 9.0);
    let narrow = m.tensor(&[1, HEADS, 1, DIM], 9.0);
    for (layer, rows, starts) in [
        (2, &good, vec![0, 0]),
        (0, &long, vec![3, 3]),
        (0, &long, vec![0, 4]),
        (0, &narrow, vec![3, 3]),
        (0, &long, vec![0]),
    ] {
        assert!(cache.update(m.stream.as_ref(), layer, rows, rows, &starts).is_err(), "{layer} {starts:?}");
    }
    let hole = cache.update(m.stream.as_ref(), 1, &good, &good, &[0, 1]);
    assert!(matches!(hole, Err(Error::OutOfRange { what: "start of the update", .. })));
    let after = m.values(
        &TensorView::new(Arc::clone(cache.arena().k()), DType::F32, &[2 * 2 * HEADS * 4 * DIM]).unwrap(),
    );
    assert_eq!((before, cache.entry_len(0, 0).unwrap()), (after, 3));
    cache.reset();
    assert!(cache.entry_len(0, 1).unwrap() == 0);
}

#[test]
fn static_and_paged_hold_the_same_bytes() {
    let m = Memory::new();
    let mut dense = StaticKvCache::new(m.arena(1, 10)).unwrap();
    let mut paged = PagedKvCache::new(m.arena(8, 4), BlockPool::new(2..8).unwrap()).unwrap();
    let sequence = paged.create(SequenceStart::default()).unwrap();
    let mut written = 0;
    for (step, tokens) in [5, 1, 1, 3].into_iter().enumerate() {
        let slots = paged.grow(sequence, tokens).unwrap();
        for layer in 0..2 {
            let rows = m.tensor(&[1, HEADS, tokens, DIM], (step * 100 + layer * 1000) as f32);
            dense.update(m.stream.as_ref(), layer, &rows, &rows, &[written]).unwrap();
            let token_major = rows.select(0, 0).unwrap().permute(&[1, 0, 2]).unwrap();
            paged
                .write(sequence, m.stream.as_ref(), layer, token_major.clone(), token_major, &slots)
                .unwrap();
        }
        written += tokens;
    }
    for layer in 0..2 {
        let read = |arena: &KvArena, slots: Arc<[i64]>| {
            let (k, v) = (m.tensor(&[10, HEADS, DIM], 0.0), m.tensor(&[10, HEADS, DIM], 0.0));
            let op =
                Gather { arena: arena.clone(), layer, slots, k: k.clone(), v: v.clone(), rotation: None };
            kvcore::Kernels::gather(m.stream.as_ref(), &op).unwrap();
            (m.values(&k), m.values(&v))
        };
        let blocks = paged.blocks(sequence).unwrap();
        let slots = (0..10).map(|i| i64::from(blocks[i / 4].0) * 4 + (i % 4) as i64).collect();
        assert_eq!(read(dense.arena(), (0..10).collect()), read(paged.arena(), slots), "layer {layer}");
    }
    let (k, _) = dense.views(1).unwrap();
    assert_eq!(k.shape(), [1, HEADS, 10, DIM]);
}
