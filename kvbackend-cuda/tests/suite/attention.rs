//! Attention with random shapes and formats, compared with f64 arithmetic. The tests run every kernel, with
//! and without tensor cores; the few shapes in the conformance suite do not reach all kernels.

use std::sync::Arc;

use kvconform::{Bench, Failure, oracle};
use kvcore::{
    Attend, AttendMla, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, Fp8Kind, KeyForm,
    KvFormat, KvShape, MergeGroup, Pairing, QueryRow, Rope, RopeConfig, ScaleScope, Segment, Selection,
    SelectionUnit,
};
use rstest::rstest;

use crate::common::opened;
use crate::double::{EAGER, LAZY, among_others};

/// The initial value of outputs, which shows whether a kernel has written them.
const UNTOUCHED: f32 = 0.25;

/// Random numbers that depend only on the seed.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Draws `n` numbers with a magnitude of at most `size`.
    fn numbers(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| size * ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0)).collect()
    }

    /// Draws a pool's shape for a format. Latents have one head; some widths are odd, so that they do not fit
    /// vector accesses.
    fn shape(&mut self, format: KvFormat, latent: bool) -> KvShape {
        let groups = matches!(format, KvFormat::Int8 { .. } | KvFormat::Int4 { .. });
        let odd = !groups && self.one_in(4);
        let even: &[usize] = if latent { &[64, 128] } else { &[64, 128, 192, 256] };
        let dims = if odd { &[6, 10, 24, 40, 80, 136][..] } else { even };
        let (k_dim, mut v_dim) = (self.pick(dims), self.pick(dims));
        let (k_heads, mut v_heads) = (self.pick(&[1, 2, 4]), self.pick(&[1, 2, 4]));
        if latent {
            v_dim = if odd { 40 } else { self.pick(&[512, 256, 128]) };
        } else if !self.one_in(3) {
            (v_heads, v_dim) = (k_heads, k_dim);
        }
        let block_size = self.pick(&[4, 16, 32, 7]);
        KvShape {
            num_layers: 2,
            num_blocks: 300 / block_size + 3,
            block_size,
            k_heads: if latent { 1 } else { k_heads },
            v_heads: if latent { 1 } else { v_heads },
            k_dim,
            v_dim,
            format,
            order: self.pick(&[BlockOrder::HeadMajor, BlockOrder::TokenMajor]),
        }
    }

    /// Draws consecutive segments whose blocks are in random order.
    fn segments(&mut self, shape: &KvShape, moved: bool, groups: usize) -> Vec<Segment> {
        let mut logical = 0;
        let count = 1 + self.below(3);
        let draw = |_| {
            let len: usize = self.pick(&[1, 3, 17, 64, 65, 100, 280]);
            let mut ids: Vec<u32> = (0..shape.num_blocks as u32).collect();
            for i in (1..ids.len()).rev() {
                ids.swap(i, self.below(i + 1));
            }
            let blocks = ids[..len.div_ceil(shape.block_size)].iter().map(|&id| BlockId(id)).collect();
            let mut segment = Segment::new(blocks, len, logical, self.below(50) as i64);
            if moved {
                segment.position_offset = self.below(200) as i64 - 30;
            }
            if self.one_in(3) {
                segment.logit_scale = 0.7;
            }
            segment.merge_group = self.below(groups);
            logical += len;
            segment
        };
        (0..count).map(draw).collect()
    }

    /// Draws a selection of a third of each row's tokens or blocks.
    fn selection(&mut self, rows: usize, segments: &[Segment], block_size: usize) -> Selection {
        let unit = self.pick(&[SelectionUnit::Tokens, SelectionUnit::Blocks]);
        let per_unit = if unit == SelectionUnit::Tokens { 1 } else { block_size };
        let units: usize = segments.iter().map(|segment| segment.len.div_ceil(per_unit)).sum();
        let (mut offsets, mut indices) = (vec![0], Vec::new());
        for _ in 0..rows {
            indices.extend((0..units as u32).filter(|_| self.one_in(3)));
            offsets.push(indices.len() as u32);
        }
        Selection { unit, offsets: offsets.into(), indices: indices.into() }
    }

    /// Draws a batch of prompts and decode steps.
    fn work(&mut self, shape: &KvShape, moved: bool) -> AttendWork {
        let groups = self.pick(&[1, 1, 2, 3]);
        let (mut rows, mut batch): (Vec<QueryRow>, Vec<AttendRows>) = (Vec::new(), Vec::new());
        for _ in 0..=self.below(3) {
            let segments = self.segments(shape, moved, groups);
            let end: usize = segments.iter().map(|segment| segment.len).sum();
            let (start, count) = (rows.len(), self.pick(&[1, 1, 1, 2, 5, 20, 40]));
            for i in 0..count {
                let last = (end + i).saturating_sub(count);
                let logical = if self.one_in(6) { self.below(end + 3) } else { last };
                rows.push(QueryRow { logical, position: (logical + self.below(100)) as i64 });
            }
            let mut entry = AttendRows::new(start..rows.len(), segments.clone());
            if self.one_in(5) {
                entry = entry.selecting(self.selection(count, &segments, shape.block_size));
            }
            batch.push(entry);
            if self.one_in(4) {
                rows.push(QueryRow { logical: 0, position: 0 }); // a row in no entry
            }
        }
        let factor = |group: usize| if group == 0 { 1.0 } else { 0.5 + 0.3 * group as f32 };
        let groups: Vec<MergeGroup> =
            (0..groups).map(|group| MergeGroup { lse_scale: factor(group) }).collect();
        AttendWork::with_groups(rows, batch, groups)
    }
}

/// Returns the largest difference, relative to the largest expected magnitude, or to 1 if that is larger.
fn difference(actual: &[f32], expected: &[f32]) -> f32 {
    let size = expected.iter().filter(|x| x.is_finite()).fold(1.0f32, |most, x| most.max(x.abs()));
    let of = |(a, e): (&f32, &f32)| if a == e { 0.0 } else { (a - e).abs() / size };
    actual.iter().zip(expected).map(of).fold(0.0, |most, x| if x <= most { most } else { x })
}

/// Runs one random call for a seed. Returns the largest difference and a description of the call.
fn trial(backend: &Arc<dyn Backend>, format: KvFormat, seed: u64) -> Result<(f32, String), Failure> {
    let mut draw = Draw(seed);
    let dtype = draw.pick(&[DType::F32, DType::F16, DType::BF16]);
    let bench = Bench::new(Arc::clone(backend), dtype)?;
    let latent = draw.one_in(4);
    let arena = bench.arena_of(draw.shape(format, latent))?;
    let (k, v) = bench.fill(&arena, seed as u32)?;
    let shape = arena.layout().shape().clone();
    let keys = if draw.one_in(5) { KeyForm::Unrotated } else { KeyForm::Rotated };
    let rotates = keys == KeyForm::Unrotated || !draw.one_in(3);
    let work = draw.work(&shape, rotates);
    let (rows, heads) = (work.rows().len(), shape.k_heads.max(shape.v_heads) * draw.pick(&[1, 2, 3, 4, 8]));
    let query_type = draw.pick(&[dtype, dtype, DType::F32]);
    let q = draw.numbers(rows * heads * shape.k_dim, 1.0);
    let q = bench.upload(query_type, &[rows, heads, shape.k_dim], &q)?;
    let pairing = draw.pick(&[Pairing::HalfSplit, Pairing::Interleaved]);
    let rotary_dim = if draw.one_in(3) { (shape.k_dim / 4 * 2).max(2) } else { shape.k_dim };
    let rope = RopeConfig { rotary_dim, pairing, ..RopeConfig::new(shape.k_dim, 300.0) };
    let op = Attend {
        layer: draw.below(2),
        rope: if rotates { Some(Arc::new(Rope::new(rope, 8192)?)) } else { None },
        keys,
        work: Arc::new(work),
        scale: if format.is_quantized() { 0.075 } else { 1.5 } / (shape.k_dim as f32).sqrt(),
        window: draw.one_in(4).then(|| draw.pick(&[1, 10, 64, 150, 100_000])),
        softcap: draw.one_in(4).then(|| draw.pick(&[1.5, 30.0])),
        out: bench.upload(
            DType::F32,
            &[rows, heads, shape.v_dim],
            &vec![UNTOUCHED; rows * heads * shape.v_dim],
        )?,
        lse: Some(bench.upload(DType::F32, &[rows, heads], &vec![UNTOUCHED; rows * heads])?),
        q,
        arena,
    };
    let numbers = bench.download(&op.q)?;
    let (out, lse) = if latent {
        let latents = draw.numbers(rows * heads * shape.v_dim, 0.3);
        let q_latent = bench.upload(query_type, &[rows, heads, shape.v_dim], &latents)?;
        let op = AttendMla { attend: op.clone(), q_latent };
        bench.stream.attend_mla(&op)?;
        oracle::attend_mla(&op, &numbers, &bench.download(&op.q_latent)?, &k, &v, UNTOUCHED)
    } else {
        bench.stream.attend(&op)?;
        oracle::attend(&op, &numbers, &k, &v, UNTOUCHED)
    };
    let sums = op.lse.as_ref().map(|view| bench.download(view)).transpose()?.unwrap_or_default();
    let most = difference(&bench.download(&op.out)?, &out).max(difference(&sums, &lse));
    Ok((most, format!("{query_type} queries, {heads} heads, latent {latent}, {keys:?}, {shape:?}")))
}

#[rstest]
#[case(DType::F32.into())]
#[case(DType::F16.into())]
#[case(DType::BF16.into())]
#[case(KvFormat::Int8 { group: 32 })]
#[case(KvFormat::Int8 { group: 8 })]
#[case(KvFormat::Int4 { group: 64 })]
#[case(KvFormat::Fp8 { kind: Fp8Kind::E4M3, scales: ScaleScope::PerHead })]
#[case(KvFormat::Fp8 { kind: Fp8Kind::E5M2, scales: ScaleScope::PerTensor })]
fn random_calls_equal_arithmetic_in_f64(#[case] format: KvFormat) {
    let _shared = among_others();
    for (device, seeds) in [(EAGER, 0..12), (LAZY, 12..16)] {
        let Some(backend) = opened(device) else { return };
        let backend: Arc<dyn Backend> = backend;
        for seed in seeds {
            let (difference, what) =
                trial(&backend, format, seed).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert!(difference < 1e-5, "seed {seed}: {difference:.1e}, {what}");
        }
    }
}
