//! Layers on several devices under one block table.

use kvmanager::{Error, Placement, SpannedArena};
use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    BlockOrder, BlockPool, BlockTable, DType, Error as CoreError, KvArena, KvLayout, KvShape, MemoryKind,
    TensorView,
};
use rstest::rstest;

use crate::common::{DIM, HEADS, Memory};

const LAYERS: usize = 5;

fn shape(num_layers: usize) -> KvShape {
    KvShape {
        num_layers,
        num_blocks: 6,
        block_size: 4,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format: DType::F32.into(),
        order: BlockOrder::TokenMajor,
    }
}

/// Returns all of K and V, layer by layer.
fn all(m: &Memory, arena: &KvArena) -> Vec<Vec<f32>> {
    let layers = arena.layout().shape().num_layers;
    [arena.k(), arena.v()]
        .map(|s| m.values(&TensorView::new(Arc::clone(s), DType::F32, &[s.len() / 4]).unwrap()))
        .iter()
        .flat_map(|plane| plane.chunks(plane.len() / layers).map(<[f32]>::to_vec).collect::<Vec<_>>())
        .collect()
}

#[rstest]
fn spanned_layers_hold_the_bytes_of_a_single_device(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let one = KvLayout::new(shape(1)).unwrap().block_bytes();
    let place = |layers, blocks: usize| Placement {
        backend: CpuBackend::with_execution(execution),
        layers,
        budget: layers * one * blocks + one - 1,
    };
    let spanned = SpannedArena::allocate(&shape(LAYERS), &[place(2, 9), place(1, 6), place(2, 7)]).unwrap();
    assert_eq!(spanned.num_blocks(), 6, "what the poorest device can have");
    let single = KvArena::allocate(
        m.backend.as_ref(),
        MemoryKind::Device,
        Arc::new(KvLayout::new(shape(LAYERS)).unwrap()),
    )
    .unwrap();

    let pool = BlockPool::new(0..6).unwrap();
    let mut table = BlockTable::new(&pool, 4).unwrap();
    let slots = table.grow(7).unwrap();
    for layer in 0..LAYERS {
        let rows = m.tensor(&[7, HEADS, DIM], 100.0 * layer as f32);
        spanned.part(layer).unwrap().0.stream.wait_for(&m.stream.record().unwrap()).unwrap();
        spanned.write(layer, rows.clone(), rows.clone(), &slots).unwrap();
        let op = kvcore::Scatter {
            arena: single.clone(),
            layer,
            k: rows.clone(),
            v: rows,
            slots: slots.clone(),
            rotation: None,
        };
        m.stream.scatter(&op).unwrap();
    }
    let mut fork = table.fork().unwrap();
    let copy = fork.unshare_tail().unwrap().unwrap();
    let pairs = copy.pairs().clone();
    spanned.copy_blocks(&pairs).unwrap();
    m.stream.copy_blocks(&kvcore::CopyBlocks { arena: single.clone(), pairs }).unwrap();
    spanned.synchronize().unwrap();

    let (k, v) = {
        let whole = all(&m, &single);
        (whole[..LAYERS].to_vec(), whole[LAYERS..].to_vec())
    };
    for part in spanned.parts() {
        let mine = all(&m, &part.arena);
        let n = part.layers.len();
        assert_eq!(mine[..n], k[part.layers.clone()]);
        assert_eq!(mine[n..], v[part.layers.clone()]);
    }
    assert!(matches!(spanned.part(LAYERS), Err(Error::Core(CoreError::OutOfRange { what: "layer", .. }))));
}

#[test]
fn placements_that_do_not_fit_are_refused() {
    let place = |layers, budget| Placement { backend: CpuBackend::new(), layers, budget };
    let refused = |placements: &[Placement]| SpannedArena::allocate(&shape(LAYERS), placements).unwrap_err();
    assert_eq!(
        refused(&[place(2, 1 << 20), place(2, 1 << 20)]),
        Error::Core(CoreError::Mismatch { what: "layers of all placements", expected: 5, got: 4 })
    );
    assert!(matches!(
        refused(&[place(4, 1 << 20), place(1, 10)]),
        Error::Core(CoreError::NotEnoughMemory { budget: 10, .. })
    ));
    let none = |placements| SpannedArena::allocate(&shape(0), placements).unwrap_err();
    assert_eq!(none(&[]), Error::Core(CoreError::Zero { what: "placements" }));
    assert_eq!(none(&[place(0, 1 << 20)]), Error::Core(CoreError::Zero { what: "num_layers" }));
    let wrapped = [place(usize::MAX, 1 << 20), place(6, 1 << 20)];
    assert_eq!(refused(&wrapped), Error::Core(CoreError::Overflow { what: "layers of all placements" }));
    assert_eq!(
        refused(&[place(5, 1 << 20), place(0, 1 << 20)]),
        Error::Core(CoreError::Zero { what: "num_layers" })
    );
}
