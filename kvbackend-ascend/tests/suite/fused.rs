//! Fused operators: the cases in which they are called, and equal results with and without them.

use std::sync::Arc;

use half::{bf16, f16};
use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvcore::{
    Attend, AttendMla, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, KeyForm, KvArena,
    KvShape, MemoryKind, MergeGroup, QueryRow, Rope, RopeConfig, Scatter, Segment, Selection, SelectionUnit,
    Stream, TensorView, WriteSlots, allocate_tensor,
};

use crate::common::{arena, download, noise, upload};
use crate::simulator::{EAGER, LAZY, Simulator, alone};

const ATTENTION: &str = "operator aclnnFusedInferAttentionScoreV2";
const SCATTER: &str = "operator aclnnScatterPaKvCache";

/// The properties of attention that a test varies.
#[derive(Clone)]
#[allow(clippy::struct_excessive_bools, reason = "each is a condition of its own")]
struct Case {
    dtype: DType,
    queries: DType,
    order: BlockOrder,
    block_size: usize,
    dim: usize,
    heads: usize,
    kv_heads: usize,
    v_heads: usize,
    v_dim: usize,
    /// True for attention to latents, with separate latent queries.
    latent: bool,
    /// True if the row entries are in reverse order.
    reversed: bool,
    window: Option<usize>,
    /// The second layer's window.
    second_window: Option<usize>,
    softcap: Option<f32>,
    logit_scale: f32,
    /// The offset of each row's second segment. The first segment's offset is 7.
    second: i64,
    /// Number of tokens in the first segment.
    first: usize,
    with_rope: bool,
    with_lse: bool,
    /// The number of rows. Rows 3, 4, … use the blocks of rows 0, 1, 2 again.
    rows: usize,
    /// True if each row sees only its first and third token.
    selects: bool,
    keys: KeyForm,
    /// True if the result overwrites the queries.
    in_place: bool,
    /// The factor for the log-sum-exp of the only merge group.
    lse_scale: f32,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            dtype: DType::BF16,
            queries: DType::BF16,
            order: BlockOrder::TokenMajor,
            block_size: 16,
            dim: 32,
            heads: 4,
            kv_heads: 2,
            v_heads: 2,
            v_dim: 32,
            latent: false,
            reversed: false,
            window: None,
            second_window: None,
            softcap: None,
            logit_scale: 1.0,
            second: 7,
            first: 32,
            with_rope: true,
            with_lse: true,
            rows: 3,
            selects: false,
            keys: KeyForm::Rotated,
            in_place: false,
            lse_scale: 1.0,
        }
    }
}

impl Case {
    fn shape(&self) -> KvShape {
        KvShape {
            num_layers: 2,
            num_blocks: 24,
            block_size: self.block_size,
            k_heads: self.kv_heads,
            v_heads: self.v_heads,
            k_dim: self.dim,
            v_dim: self.v_dim,
            format: self.dtype.into(),
            order: self.order,
        }
    }

    /// Returns the attention work: rows with two segments each.
    fn work(&self) -> Arc<AttendWork> {
        let (offset, size) = (if self.with_rope { 7 } else { 0 }, self.block_size);
        let per_segment = self.first.div_ceil(size);
        let entry = |row: usize| {
            let blocks = |at: usize, n: usize| (at..at + n).map(|b| BlockId(b as u32)).collect::<Vec<_>>();
            let first = blocks(8 * (row % 3), per_segment);
            let mut first = Segment::new(first.into(), self.first, 0, 0).at_offset(offset);
            first.logit_scale = self.logit_scale;
            let second = blocks(8 * (row % 3) + per_segment, 2);
            let offset = if self.with_rope { self.second } else { 0 };
            let second = Segment::new(second.into(), size + 3 + row % 3, self.first, self.first as i64)
                .at_offset(offset);
            let entry = AttendRows::new(row..row + 1, [first, second]);
            if !self.selects {
                return entry;
            }
            let (unit, offsets, indices) = (SelectionUnit::Tokens, [0, 2].into(), [0, 2].into());
            entry.selecting(Selection { unit, offsets, indices })
        };
        let rows = (0..self.rows).map(|row| {
            let last = self.first + size + 2 + row % 3;
            QueryRow { logical: last, position: last as i64 + offset }
        });
        let (rows, entries): (Vec<_>, Vec<_>) = (rows.collect(), (0..self.rows).map(entry).collect());
        let entries: Vec<AttendRows> =
            if self.reversed { entries.into_iter().rev().collect() } else { entries };
        let groups = [MergeGroup { lse_scale: self.lse_scale }];
        Arc::new(AttendWork::with_groups(rows, entries, groups))
    }
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect(),
        DType::F16 => {
            bytes.chunks_exact(2).map(|b| f16::from_ne_bytes(b.try_into().unwrap()).to_f32()).collect()
        }
        _ => bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes(b.try_into().unwrap()).to_f32()).collect(),
    }
}

fn bytes(dtype: DType, floats: impl Iterator<Item = f32>) -> Vec<u8> {
    floats
        .flat_map(|x| match dtype {
            DType::F32 => x.to_ne_bytes().to_vec(),
            DType::F16 => f16::from_f32(x).to_ne_bytes().to_vec(),
            _ => bf16::from_f32(x).to_ne_bytes().to_vec(),
        })
        .collect()
}

/// Returns numbers between −1 and 1.
fn small(seed: u64, n: usize) -> impl Iterator<Item = f32> {
    noise(seed, 2 * n).into_iter().step_by(2).map(|byte| f32::from(byte) / 128.0 - 1.0)
}

fn fill(stream: &dyn Stream, pool: &KvArena, dtype: DType) {
    for (seed, plane) in [pool.k_plane(), pool.v_plane()].into_iter().enumerate() {
        let n = plane.storage.len() / dtype.bytes_for(1).unwrap();
        let view = TensorView::new(Arc::clone(plane.storage), dtype, &[n]).unwrap();
        stream.write(&view, &bytes(dtype, small(seed as u64, n))).unwrap();
    }
}

/// Runs attention. Returns the result, the log-sum-exps, and the operators that ran.
fn attend(
    simulator: &Simulator,
    device: usize,
    plain: bool,
    case: &Case,
) -> (Vec<f32>, Vec<f32>, Vec<String>) {
    let backend = AscendBackend::with_options(&AscendOptions { device, plain }).unwrap();
    let stream = backend.stream().unwrap();
    let pool = arena(backend.as_ref(), case.shape());
    fill(stream.as_ref(), &pool, case.dtype);
    let rope = Arc::new(Rope::new(RopeConfig::new(case.dim, 100.0), 1024).unwrap());
    let dims = [case.rows, case.heads, case.dim];
    let q = bytes(case.queries, small(9, dims.iter().product()));
    let q = upload(backend.as_ref(), case.queries, &dims, &q);
    let new =
        |dtype, dims: &[usize]| allocate_tensor(backend.as_ref(), MemoryKind::Device, dtype, dims).unwrap();
    let out = if case.in_place { q.clone() } else { new(case.queries, &[dims[0], dims[1], case.v_dim]) };
    let lse = new(DType::F32, &dims[..2]);
    stream.synchronize().unwrap();
    simulator.trace(device);
    let work = case.work();
    for layer in 0..2 {
        let attend = Attend {
            arena: pool.clone(),
            layer,
            q: q.clone(),
            rope: case.with_rope.then(|| Arc::clone(&rope)),
            keys: case.keys,
            work: Arc::clone(&work),
            scale: 0.25,
            window: if layer == 1 { case.second_window.or(case.window) } else { case.window },
            softcap: case.softcap,
            out: out.clone(),
            lse: case.with_lse.then(|| lse.clone()),
        };
        if case.latent {
            stream.attend_mla(&AttendMla { attend, q_latent: q.clone() }).unwrap();
        } else {
            stream.attend(&attend).unwrap();
        }
    }
    let ran = simulator.trace(device).into_iter().filter(|line| line.starts_with("operator")).collect();
    let result = floats(case.queries, &download(stream.as_ref(), &out));
    (result, floats(DType::F32, &download(stream.as_ref(), &lse)), ran)
}

fn close(a: &[f32], b: &[f32], most: f32, what: &str) {
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(a.len() == b.len() && worst <= most, "{what}: {worst} apart");
}

#[test]
fn rows_that_decode_attend_by_one_operator_with_the_results_of_many() {
    let Some((simulator, _alone)) = alone() else { return };
    let base = Case::default();
    let cases = [
        base.clone(),
        Case { order: BlockOrder::HeadMajor, ..base.clone() },
        Case { dtype: DType::F16, queries: DType::F16, ..base.clone() },
        Case { with_rope: false, ..base.clone() },
        Case { with_lse: false, block_size: 48, first: 48, dim: 512, v_dim: 512, ..base.clone() },
        Case { kv_heads: 1, v_heads: 1, heads: 3, ..base.clone() },
        Case { window: Some(200), ..base.clone() },
        Case { with_rope: false, in_place: true, ..base.clone() },
    ];
    for (number, case) in cases.iter().enumerate() {
        for device in [EAGER, LAZY] {
            let (out, lse, ran) = attend(simulator, device, false, case);
            assert_eq!(ran.iter().filter(|line| *line == ATTENTION).count(), 2, "case {number}: {ran:?}");
            assert!(ran.iter().all(|line| !line.contains("BatchMatMul")), "case {number}: {ran:?}");
            let (expected, sums, ran) = attend(simulator, device, true, case);
            assert!(ran.iter().all(|line| line != ATTENTION), "case {number}: {ran:?}");
            // The operator rounds queries and weights to the cache's type.
            let ulp = if case.dtype == DType::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 };
            close(&out, &expected, 2.0 * ulp, &format!("case {number}"));
            close(&lse, &sums, 2.0 * ulp, &format!("case {number}, log-sum-exps"));
        }
    }
}

#[test]
fn other_attention_is_composed_of_many_operators() {
    let Some((simulator, _alone)) = alone() else { return };
    let base = Case::default();
    let cases = [
        ("queries of 32 bits", Case { queries: DType::F32, ..base.clone() }),
        ("a cache of another type", Case { queries: DType::F16, ..base.clone() }),
        ("a window", Case { window: Some(9), ..base.clone() }),
        ("a soft-cap", Case { softcap: Some(5.0), ..base.clone() }),
        ("a temperature", Case { logit_scale: 2.0, ..base.clone() }),
        ("a selection", Case { selects: true, ..base.clone() }),
        ("keys that were not rotated", Case { keys: KeyForm::Unrotated, ..base.clone() }),
        ("a scale of the log-sum-exp", Case { lse_scale: 0.9, ..base.clone() }),
        ("latents", Case { latent: true, kv_heads: 1, v_heads: 1, ..base.clone() }),
        ("values of another width", Case { v_dim: 16, ..base.clone() }),
        ("values of other heads", Case { v_heads: 1, ..base.clone() }),
        ("entries in another order", Case { reversed: true, ..base.clone() }),
        ("several offsets", Case { second: 8, ..base.clone() }),
        ("a segment that ends inside of a block", Case { first: 30, ..base.clone() }),
        ("blocks of 8 tokens", Case { block_size: 8, ..base.clone() }),
        ("heads of 24 elements", Case { dim: 24, v_dim: 24, ..base.clone() }),
        ("300 heads", Case { heads: 300, kv_heads: 150, v_heads: 150, ..base.clone() }),
        ("more blocks in the table than there are", Case { rows: 9, ..base.clone() }),
        ("65 heads for one", Case { heads: 65, kv_heads: 1, v_heads: 1, ..base.clone() }),
    ];
    for (what, case) in &cases {
        let (out, _, ran) = attend(simulator, EAGER, false, case);
        assert!(ran.iter().all(|line| line != ATTENTION), "{what}");
        let (expected, _, _) = attend(simulator, EAGER, true, case);
        assert_eq!(out, expected, "{what}");
    }
}

#[test]
fn layers_of_one_step_may_have_windows_of_their_own() {
    let Some((simulator, _alone)) = alone() else { return };
    let case = Case { second_window: Some(9), ..Case::default() };
    let (out, _, ran) = attend(simulator, LAZY, false, &case);
    assert_eq!(ran.iter().filter(|line| *line == ATTENTION).count(), 1, "the first layer only");
    let (expected, _, _) = attend(simulator, LAZY, true, &case);
    assert_eq!(out, expected);
}

#[test]
fn rows_go_to_their_slots_by_one_operator_with_the_bytes_of_two() {
    let Some((simulator, _alone)) = alone() else { return };
    let base = Case::default();
    let cases = [
        (true, base.clone()),
        (true, Case { queries: DType::F32, ..base.clone() }),
        (true, Case { v_dim: 16, ..base.clone() }),
        (false, Case { v_heads: 1, ..base.clone() }),
        (false, Case { order: BlockOrder::HeadMajor, ..base.clone() }),
        (false, Case { dtype: DType::F32, queries: DType::F32, ..base.clone() }),
    ];
    for (fused, case) in &cases {
        let run = |plain: bool| {
            let backend = AscendBackend::with_options(&AscendOptions { device: LAZY, plain }).unwrap();
            let stream = backend.stream().unwrap();
            let pool = arena(backend.as_ref(), case.shape());
            fill(stream.as_ref(), &pool, case.dtype);
            let rows = |seed, heads, dim| {
                let dims = [5, heads, dim];
                let rows = bytes(case.queries, small(seed, dims.iter().product()));
                upload(backend.as_ref(), case.queries, &dims, &rows)
            };
            // A padding row, and two rows for one slot, of which the last is used.
            let slots = vec![40, -1, 3, 383, 3];
            let scatter = Scatter {
                arena: pool.clone(),
                layer: 1,
                k: rows(3, case.kv_heads, case.dim),
                v: rows(4, case.v_heads, case.v_dim),
                slots: WriteSlots::unchecked(slots),
                rotation: None,
            };
            stream.synchronize().unwrap();
            simulator.trace(LAZY);
            stream.scatter(&scatter).unwrap();
            stream.synchronize().unwrap();
            let ran = simulator.trace(LAZY).iter().filter(|line| *line == SCATTER).count();
            let planes = [pool.k_plane(), pool.v_plane()].map(|plane| {
                let view =
                    TensorView::new(Arc::clone(plane.storage), DType::U8, &[plane.storage.len()]).unwrap();
                download(stream.as_ref(), &view)
            });
            (ran, planes)
        };
        let ((ran, planes), (none, expected)) = (run(false), run(true));
        assert_eq!((ran, none), (usize::from(*fused), 0), "{:?}, {:?}", case.dtype, case.order);
        assert!(planes == expected, "{:?}, {:?}", case.dtype, case.order);
    }
}

#[test]
fn lists_that_are_used_again_are_held() {
    let Some((_, _alone)) = alone() else { return };
    // Runs with angles, which may be sent after the block table, and without.
    for with_rope in [true, false] {
        used_again(&Case { with_rope, ..Case::default() });
    }
}

fn used_again(case: &Case) {
    let backend = AscendBackend::with_options(&AscendOptions { device: LAZY, plain: false }).unwrap();
    let stream = backend.stream().unwrap();
    let pool = arena(backend.as_ref(), KvShape { num_blocks: 256, ..case.shape() });
    // This runs on another stream, so that no memory of large lists can be reused for small ones.
    fill(backend.stream().unwrap().as_ref(), &pool, case.dtype);
    let rope = Arc::new(Rope::new(RopeConfig::new(case.dim, 100.0), 1024).unwrap());
    let (work, dims) = (case.work(), [3, case.heads, case.dim]);
    let rows = |count: usize, heads| {
        let dims = [count, heads, case.dim];
        upload(backend.as_ref(), case.dtype, &dims, &bytes(case.dtype, small(3, dims.iter().product())))
    };
    for _ in 0..2 {
        stream.synchronize().unwrap();
        let attend = Attend {
            arena: pool.clone(),
            layer: 0,
            q: rows(3, case.heads),
            rope: case.with_rope.then(|| Arc::clone(&rope)),
            keys: KeyForm::Rotated,
            work: Arc::clone(&work),
            scale: 0.25,
            window: None,
            softcap: None,
            out: allocate_tensor(backend.as_ref(), MemoryKind::Device, case.dtype, &dims).unwrap(),
            lse: None,
        };
        stream.attend(&attend).unwrap();
    }
    // Enough larger lists that no list memory is left for the first one.
    for i in 0..60i64 {
        let slots = WriteSlots::unchecked((i..i + 1500).collect::<Vec<_>>());
        let (k, v) = (rows(1500, case.kv_heads), rows(1500, case.kv_heads));
        stream.scatter(&Scatter { arena: pool.clone(), layer: 0, k, v, slots, rotation: None }).unwrap();
    }
    stream.synchronize().unwrap();
}
