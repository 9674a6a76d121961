//! Pools that are bound in parts behave like pools that are bound whole.

use std::sync::{Arc, OnceLock};

use kvbackend_cpu::CpuBackend;
use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvcore::{
    Attend, AttendMass, AttendRows, AttendWork, Backend, BlockId, BlockOrder, CopyBlocks, DType, Gather,
    KeyForm, KvArena, KvFormat, KvShape, MemoryKind, QueryRow, Result, Rope, RopeConfig, Scatter, Segment,
    Stream, SwapBlocks, WritePairs, WriteSlots, allocate_tensor,
};
use proptest::prelude::*;

use crate::common::{arena, contents, download, known, noise, upload};

/// The size of a binding in bytes, far below the size of these tests' arenas.
const BINDING: u64 = 4096;

const BLOCKS: usize = 24;

fn windowed() -> Option<Arc<WgpuBackend>> {
    static BACKEND: OnceLock<Result<Arc<WgpuBackend>>> = OnceLock::new();
    let options = || WgpuOptions { max_binding: Some(BINDING), ..WgpuOptions::default() };
    known(BACKEND.get_or_init(|| WgpuBackend::with_options(&options())).clone())
}

fn shape(format: KvFormat, order: BlockOrder) -> KvShape {
    KvShape {
        num_layers: 3,
        num_blocks: BLOCKS,
        block_size: 4,
        k_heads: 2,
        v_heads: 2,
        k_dim: 24,
        v_dim: 16,
        format,
        order,
    }
}

/// Returns rows of f32 numbers between −1 and 1.
fn rows(backend: &dyn Backend, seed: u64, shape: &[usize]) -> kvcore::TensorView {
    let n = shape.iter().product();
    let values: Vec<u8> =
        noise(seed, n).iter().flat_map(|&b| (f32::from(b) / 127.5 - 1.0).to_ne_bytes()).collect();
    upload(backend, DType::F32, shape, &values)
}

/// Fills a layer with random rows.
fn fill(backend: &dyn Backend, stream: &dyn Stream, arena: &KvArena, layer: usize) {
    let n = BLOCKS * 4;
    let (k, v) = (rows(backend, layer as u64, &[n, 2, 24]), rows(backend, !layer as u64, &[n, 2, 16]));
    let slots = (0..n as i64).map(|i| i * 29 % n as i64).collect::<Vec<_>>();
    stream
        .scatter(&Scatter {
            arena: arena.clone(),
            layer,
            k,
            v,
            slots: WriteSlots::unchecked(slots),
            rotation: None,
        })
        .unwrap();
}

/// Returns an attention's output, followed by the attention mass of the first half of its blocks.
fn attend(
    backend: &dyn Backend,
    stream: &dyn Stream,
    arena: &KvArena,
    blocks: &[u32],
    offset: i64,
) -> Vec<f32> {
    let heads = 4;
    let q = rows(backend, 77, &[5, heads, 24]);
    let out = allocate_tensor(backend, MemoryKind::Device, DType::F32, &[5, heads, 16]).unwrap();
    let len = blocks.len() * 4;
    let ids: Arc<[BlockId]> = blocks.iter().map(|&block| BlockId(block)).collect();
    let (first, second) = ids.split_at(ids.len() / 2);
    let segments = [
        Segment::new(first.into(), first.len() * 4, 0, 0),
        Segment::new(second.into(), second.len() * 4, first.len() * 4, 0).at_offset(offset),
    ];
    let op = Attend {
        arena: arena.clone(),
        layer: 1,
        q,
        rope: Some(Arc::new(Rope::new(RopeConfig::new(24, 500.0), 8192).unwrap())),
        keys: KeyForm::Rotated,
        work: Arc::new(AttendWork::new(
            (0..5)
                .map(|i| QueryRow { logical: len - 5 + i, position: offset + 100 + i as i64 })
                .collect::<Vec<_>>(),
            [AttendRows::new(0..5, segments)],
        )),
        scale: 0.2,
        window: None,
        softcap: None,
        out: out.clone(),
        lse: Some(allocate_tensor(backend, MemoryKind::Device, DType::F32, &[5, heads]).unwrap()),
    };
    stream.attend(&op).unwrap();
    let sums = allocate_tensor(backend, MemoryKind::Device, DType::F32, &[first.len() * 4]).unwrap();
    stream.attend_mass(&AttendMass { attend: op, q_latent: None, entry: 0, sums: sums.clone() }).unwrap();
    bytemuck::pod_collect_to_vec(&[download(stream, &out), download(stream, &sums)].concat())
}

#[test]
fn what_is_longer_than_a_window_is_copied_in_pieces() {
    let Some(backend) = windowed() else { return };
    let stream = backend.stream().unwrap();
    for (len, start) in [(3 * BINDING as usize, 0), (2 * BINDING as usize + 17, 3)] {
        let bytes = noise(5, len);
        let whole = upload(backend.as_ref(), DType::U8, &[len + 8], &vec![9; len + 8]);
        let part = whole.slice(0, start, start + len).unwrap();
        stream.write(&part, &bytes).unwrap();
        let copy = upload(backend.as_ref(), DType::U8, &[len], &vec![0; len]);
        part.copy_to(&copy, stream.as_ref()).unwrap();
        assert!(download(stream.as_ref(), &copy) == bytes, "{len} bytes from {start}");
        let around = download(stream.as_ref(), &whole);
        assert!(around[..start].iter().chain(&around[start + len..]).all(|byte| *byte == 9));
    }
    // A transposition over ten windows, which reads from the whole source for each row of the destination.
    let (rows, columns) = (90, 230);
    let bytes = noise(6, rows * columns * 2);
    let src = upload(backend.as_ref(), DType::F16, &[rows, columns], &bytes);
    let dst = upload(backend.as_ref(), DType::F16, &[columns, rows], &vec![0; bytes.len()]);
    src.permute(&[1, 0]).unwrap().copy_to(&dst, stream.as_ref()).unwrap();
    let element = |i: usize| bytes[(i % rows * columns + i / rows) * 2..][..2].to_vec();
    let expected: Vec<u8> = (0..rows * columns).flat_map(element).collect();
    assert!(download(stream.as_ref(), &dst) == expected, "a transposed tensor");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn pools_in_parts_equal_the_host(
        pairs in prop::collection::btree_map(0..BLOCKS as u32 / 2, BLOCKS as u32 / 2..BLOCKS as u32, 1..8),
        blocks in Just((0..BLOCKS as u32).collect::<Vec<_>>()).prop_shuffle(),
        used in 2..BLOCKS,
        offset in prop::sample::select(vec![0i64, 7, 1000, 6000]),
        order in prop::sample::select(vec![BlockOrder::TokenMajor, BlockOrder::HeadMajor]),
        format in prop::sample::select(vec![KvFormat::from(DType::F32), DType::BF16.into(), KvFormat::Int8 { group: 8 }]),
    ) {
        let Some(wgpu) = windowed() else { return Ok(()) };
        let cpu = CpuBackend::new();
        let results = [wgpu.as_ref() as &dyn Backend, cpu.as_ref()].map(|backend| {
            let stream = backend.stream().unwrap();
            let (one, two) = (arena(backend, shape(format, order)), arena(backend, shape(format, BlockOrder::HeadMajor)));
            (0..3).for_each(|layer| fill(backend, stream.as_ref(), &one, layer));
            // Keep only the first pair for each destination.
            let once = |(i, pair): &(usize, (&u32, &u32))| !pairs.values().take(*i).any(|to| to == pair.1);
            let pairs: Arc<[_]> =
                pairs.iter().enumerate().filter(once).map(|(_, (&from, &to))| (BlockId(from), BlockId(to))).collect();
            stream.copy_blocks(&CopyBlocks { arena: one.clone(), pairs: WritePairs::unchecked(Arc::clone(&pairs)) }).unwrap();
            stream.swap_blocks(&SwapBlocks { src: one.clone(), dst: two.clone(), pairs: WritePairs::unchecked(pairs) }).unwrap();
            let gathered = [24, 16].map(|dim| allocate_tensor(backend, MemoryKind::Device, DType::F32, &[BLOCKS, 2, dim]).unwrap());
            let slots = (0..BLOCKS as i64).map(|i| i * 41 % (BLOCKS as i64 * 4)).collect::<Vec<_>>();
            let [k, v] = gathered.clone();
            // Rows of a dense arena have its element type; their contents are compared as blocks.
            if format != KvFormat::Dense(DType::BF16) {
                stream.gather(&Gather { arena: one.clone(), layer: 2, slots: slots.into(), k, v, rotation: None }).unwrap();
            }
            let out = attend(backend, stream.as_ref(), &one, &blocks[..used], offset);
            let stored = [contents(stream.as_ref(), &one), contents(stream.as_ref(), &two)];
            (stored, gathered.map(|view| download(stream.as_ref(), &view)), out)
        });
        let [(stored, gathered, out), (stored_there, gathered_there, out_there)] = results;
        prop_assert!(stored == stored_there && gathered == gathered_there, "bytes differ");
        for (a, b) in out.iter().zip(&out_there) {
            prop_assert!((a - b).abs() <= 2e-5 * b.abs().max(1.0), "attention: {} and {}", a, b);
        }
    }
}
