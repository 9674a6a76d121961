//! The bytes of blocks are the same whether they are copied directly or staged, for every format and layout.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::ReplicaDevice;
use kvcore::{
    Backend, BlockId, BlockOrder, Capabilities, CounterSnapshot, DType, KeyForm, KvArena, KvFormat, KvLayout,
    KvShape, MemoryKind, PlaneStrides, Result, Storage, Stream, TensorView, WritePairs,
};
use kvtier::RecordBuffer;
use rstest::rstest;

const LAYERS: usize = 3;
const BLOCKS: usize = 6;

/// A backend that does not tell that its memory is host memory, so that bytes are staged.
#[derive(Debug)]
struct Staged(Arc<CpuBackend>);

impl Backend for Staged {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        self.0.allocate(kind, bytes)
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        self.0.stream()
    }

    fn counters(&self) -> CounterSnapshot {
        self.0.counters()
    }
}

fn shape(format: &str, order: BlockOrder) -> KvShape {
    let format: KvFormat = format.parse().unwrap();
    let (k_dim, v_dim) = (32, 64);
    KvShape {
        num_layers: LAYERS,
        num_blocks: BLOCKS,
        block_size: 4,
        k_heads: 2,
        v_heads: 3,
        k_dim,
        v_dim,
        format,
        order,
    }
}

/// Returns an arena with gaps between blocks and layers, and blocks outside layers.
fn outside(shape: &KvShape) -> KvLayout {
    let dense = KvLayout::new(shape.clone()).unwrap();
    let strides = |dense: PlaneStrides| {
        let layer = dense.block + 64;
        PlaneStrides { layer, block: LAYERS * layer + 128, ..dense }
    };
    KvLayout::with_strides(shape.clone(), strides(dense.k_strides()), strides(dense.v_strides())).unwrap()
}

/// Returns the same arena as two devices: one copies directly, and one stages.
fn devices(layout: KvLayout, seed: u8) -> [ReplicaDevice; 2] {
    let backend = CpuBackend::new();
    let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout)).unwrap();
    let stream = backend.stream().unwrap();
    let mut state = seed;
    for storage in [arena.k_plane().storage, arena.v_plane().storage] {
        let bytes: Vec<u8> = (0..storage.len())
            .map(|at| {
                state = state.wrapping_mul(31).wrapping_add(at as u8 ^ 0x5a);
                state
            })
            .collect();
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
        stream.write(&view, &bytes).unwrap();
    }
    let staged: Arc<dyn Backend> = Arc::new(Staged(backend.clone()));
    let backend: Arc<dyn Backend> = backend;
    [backend, staged].map(|backend| ReplicaDevice {
        backend,
        stream: Arc::clone(&stream),
        arena: arena.clone(),
        keys: KeyForm::Rotated,
    })
}

fn all_bytes(device: &ReplicaDevice) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for plane in [device.arena.k_plane(), device.arena.v_plane()] {
        for storage in std::iter::once(plane.storage).chain(plane.scales.map(|(storage, _)| storage)) {
            let mut bytes = vec![0; storage.len()];
            let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
            device.stream.read(&view, &mut bytes).unwrap();
            all.push(bytes);
        }
    }
    all
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

#[rstest]
fn direct_copies_equal_staged_ones(
    #[values("f32", "bf16", "int8", "int4", "fp8-e4m3", "fp8-e5m2:head")] format: &str,
    #[values(BlockOrder::TokenMajor, BlockOrder::HeadMajor)] order: BlockOrder,
    #[values(false, true)] gaps: bool,
) {
    let shape = shape(format, order);
    let layout = || if gaps { outside(&shape) } else { KvLayout::new(shape.clone()).unwrap() };
    let [direct, staged] = devices(layout(), 7);
    for blocks in [&[2][..], &[5, 0, 3], &[0, 1, 2, 3, 4, 5]] {
        let blocks = ids(blocks);
        let contents = direct.read(&blocks).unwrap();
        assert_eq!(contents, staged.read(&blocks).unwrap());
        // Into other arenas, in another order, and not all of them.
        let targets = [4, 1, 5, 0, 2, 3].map(BlockId);
        let pairs: Vec<_> = (0..blocks.len())
            .rev()
            .skip(usize::from(blocks.len() > 1))
            .map(|at| (BlockId(at as u32), targets[at]))
            .collect();
        let [a, b] = [devices(layout(), 99), devices(layout(), 99)];
        let before = all_bytes(&a[0]);
        a[0].write(blocks.len(), WritePairs::unchecked(pairs.clone()), &contents).unwrap();
        b[1].write(blocks.len(), WritePairs::unchecked(pairs), &contents).unwrap();
        let after = all_bytes(&a[0]);
        assert_eq!(after, all_bytes(&b[0]));
        assert_ne!(after, before);
    }
}

#[rstest]
fn contents_that_do_not_fit_are_refused_and_change_nothing(#[values(0, 1)] way: usize) {
    let layout = || KvLayout::new(shape("int8", BlockOrder::TokenMajor)).unwrap();
    let device = &devices(layout(), 7)[way];
    let contents = device.read(&ids(&[1, 2])).unwrap();
    let before = all_bytes(device);
    let write = |pairs: &[(u32, u32)], contents: &[RecordBuffer]| {
        let pairs: Vec<_> = pairs.iter().map(|&(from, to)| (BlockId(from), BlockId(to))).collect();
        device.write(2, WritePairs::unchecked(pairs), contents)
    };
    let mut short = contents.clone();
    short[2] = short[2][1..].to_vec().into();
    for (pairs, contents) in [
        (&[(0, 3)][..], &contents[..3]),
        (&[(0, 3)], &short),
        (&[(0, 3), (1, BLOCKS as u32)], &contents),
        (&[(0, 3), (2, 4)], &contents),
    ] {
        write(pairs, contents).unwrap_err();
    }
    device.read(&ids(&[0, BLOCKS as u32])).unwrap_err();
    assert_eq!(all_bytes(device), before);
    write(&[(0, 3), (1, 4)], &contents).unwrap();
    assert_eq!(device.read(&ids(&[3, 4])).unwrap(), contents);
}
