//! Measures quantised caches: the memory, the attention error and the time of each format.
//!
//! `--tokens N` sets the longest context (default 32768); an eighth and a half of this length are also
//! measured. `--markdown` prints the table of `docs/quantization.md` for the longest context, after the
//! JSON lines.
//!
//! The data: K and V of one layer, 8 heads of 128, standard normal. In K four channels of each head are ten
//! times as large, in V two channels five times, as in activations of language models. Queries of 32 heads
//! are standard normal and not rotated; the softmax scale is `1 / sqrt(128)`. Errors compare the output of
//! `attend` for 16 queries with the output for an f32 cache. One error is the root mean square of the
//! difference relative to that of the output; the other is the largest difference relative to the largest
//! magnitude.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;
use std::time::Instant;

use kvbackend_cpu::CpuBackend;
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, DType, Dequantize, KeyForm, KvArena, KvFormat, KvPlane,
    MemoryKind, Quantize, QueryRow, Result, Scatter, Segment, Stream, TensorView, WritePairs, WriteSlots,
    allocate_tensor,
};

use kvbench::lab::{BLOCK, DIM, HEADS, QUERY_HEADS, arena, shuffled};
use kvbench::limits::Memcpy;
use kvbench::{option, row, row_of_sweep, time};

/// The number of queries to measure errors over.
const QUERIES: usize = 16;
/// The number of decode steps per format, of which the fastest is reported.
const DECODES: usize = 60;
/// The formats to measure.
const FORMATS: [&str; 10] = [
    "f32",
    "bf16",
    "int8:32",
    "int8:128",
    "int4:32",
    "int4:128",
    "fp8-e4m3",
    "fp8-e4m3:head",
    "fp8-e5m2",
    "fp8-e5m2:head",
];

/// Returns standard normal numbers (by the Box–Muller transform).
fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let draw = || ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32;
    std::iter::repeat_with(draw).take(n).collect()
}

/// Returns the rows of one plane, with certain channels of each head `times` as large.
fn outliers(seed: u64, tokens: usize, channels: &[usize], times: f32) -> Vec<f32> {
    let mut values = normal(seed, tokens * HEADS * DIM);
    for head in values.chunks_mut(DIM) {
        for &channel in channels {
            head[channel] *= times;
        }
    }
    values
}

struct Lab {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    tokens: usize,
    blocks: Vec<BlockId>,
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
}

/// The measurements of one format.
struct Measured {
    format: KvFormat,
    bytes_per_element: f64,
    out: Vec<f32>,
    /// A decode step of one row.
    one: Attend,
    /// Seconds of `one`.
    decode: f64,
    /// Ratios to `memcpy` of the source bytes; `None` for dense formats.
    conversions: Option<[f64; 2]>,
}

impl Lab {
    fn new(tokens: usize) -> Result<Self> {
        let backend = CpuBackend::new();
        Ok(Self {
            stream: backend.stream()?,
            backend,
            tokens,
            blocks: shuffled((tokens / BLOCK) as u32).into_iter().map(BlockId).collect(),
            k: outliers(1, tokens, &[7, 23, 64, 101], 10.0),
            v: outliers(2, tokens, &[11, 90], 5.0),
            q: normal(3, QUERIES * QUERY_HEADS * DIM),
        })
    }

    fn upload(&self, shape: &[usize], values: &[f32]) -> Result<TensorView> {
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, shape)?;
        self.stream.write(&view, bytemuck::cast_slice(values))?;
        Ok(view)
    }

    /// Returns an arena filled with the data.
    fn filled(&self, format: KvFormat) -> Result<KvArena> {
        let arena = arena(self.backend.as_ref(), format, self.blocks.len())?;
        if let KvFormat::Fp8 { .. } = format {
            let [k, v] = [(arena.k_plane(), &self.k), (arena.v_plane(), &self.v)]
                .map(|(plane, values)| static_scales(&plane, values));
            arena.set_scales(self.stream.as_ref(), &k, &v)?;
        }
        let slot = |i: usize| i64::from(self.blocks[i / BLOCK].0) * BLOCK as i64 + (i % BLOCK) as i64;
        self.stream.scatter(&Scatter {
            arena: arena.clone(),
            layer: 0,
            k: self.upload(&[self.tokens, HEADS, DIM], &self.k)?,
            v: self.upload(&[self.tokens, HEADS, DIM], &self.v)?,
            slots: WriteSlots::unchecked((0..self.tokens).map(slot).collect::<Arc<[_]>>()),
            rotation: None,
        })?;
        Ok(arena)
    }

    /// Returns an attend for the first `rows` queries.
    fn attend(&self, arena: &KvArena, rows: usize) -> Result<Attend> {
        let shape = [rows, QUERY_HEADS, DIM];
        let segment = Segment::new(self.blocks.as_slice().into(), self.tokens, 0, 0);
        Ok(Attend {
            arena: arena.clone(),
            layer: 0,
            q: self.upload(&shape, &self.q[..shape.iter().product()])?,
            rope: None,
            keys: KeyForm::default(),
            work: Arc::new(AttendWork::new(
                vec![QueryRow { logical: self.tokens, position: self.tokens as i64 }; rows],
                [AttendRows::new(0..rows, [segment])],
            )),
            scale: 1.0 / (DIM as f32).sqrt(),
            window: None,
            softcap: None,
            out: allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &shape)?,
            lse: None,
        })
    }

    /// Measures everything but the time of a decode step.
    fn measure(&self, format: KvFormat) -> Result<Measured> {
        let arena = self.filled(format)?;
        let op = self.attend(&arena, QUERIES)?;
        self.stream.attend(&op)?;
        let mut out = vec![0f32; op.out.len()];
        self.stream.read(&op.out, bytemuck::cast_slice_mut(&mut out))?;
        let one = self.attend(&arena, 1)?;
        let conversions = format.is_quantized().then(|| self.conversions(&arena)).transpose()?;
        let bytes_per_element = arena.layout().token_bytes() as f64 / (2 * HEADS * DIM) as f64;
        Ok(Measured { format, bytes_per_element, out, one, decode: f64::INFINITY, conversions })
    }

    /// Measures a decode step with every format, in turns.
    fn decode_in_turns(&self, all: &mut [Measured]) {
        for _ in 0..DECODES {
            for m in &mut *all {
                let start = Instant::now();
                self.stream.attend(&m.one).expect("attend");
                m.decode = m.decode.min(start.elapsed().as_secs_f64());
            }
        }
    }

    /// Measures `quantize` from bf16, and `dequantize` to bf16.
    fn conversions(&self, quantised: &KvArena) -> Result<[f64; 2]> {
        let (dense, format) = (self.filled(DType::BF16.into())?, quantised.layout().shape().format);
        let pairs: Arc<[_]> = self.blocks.iter().map(|&block| (block, block)).collect();
        let bytes = |arena: &KvArena| arena.layout().block_bytes() * self.blocks.len();
        let op = Quantize {
            src: dense.clone(),
            dst: quantised.clone(),
            pairs: WritePairs::unchecked(Arc::clone(&pairs)),
        };
        let quantize = time(|| self.stream.quantize(&op).expect("quantize"));
        let op =
            Dequantize { src: quantised.clone(), dst: dense.clone(), pairs: WritePairs::unchecked(pairs) };
        let dequantize = time(|| self.stream.dequantize(&op).expect("dequantize"));
        Ok([("quantize", &dense, quantize), ("dequantize", quantised, dequantize)].map(
            |(what, src, seconds)| {
                let mut memcpy = Memcpy::new(bytes(src), 1);
                let limit = time(|| memcpy.run());
                row(&format!("{what}, bf16 and {format}"), bytes(src), seconds, "memcpy of its source", limit)
            },
        ))
    }
}

/// Returns scales that just fit the largest element of a tensor or head.
fn static_scales(plane: &KvPlane, values: &[f32]) -> Vec<f32> {
    let (KvFormat::Fp8 { kind, .. }, Some((_, scales))) = (plane.format, plane.scales) else {
        return Vec::new();
    };
    let n = scales.bytes / size_of::<f32>();
    (0..n)
        .map(|i| {
            let heads = values.chunks(DIM).enumerate().filter(|(row, _)| n == 1 || row % HEADS == i);
            let amax = heads.flat_map(|(_, head)| head).fold(0f32, |amax, x| amax.max(x.abs()));
            kind.scale_for(amax)
        })
        .collect()
}

/// Returns two errors: the root mean square of the difference divided by the root mean square of `exact`,
/// and the largest difference divided by the largest magnitude in `exact`.
fn errors(out: &[f32], exact: &[f32]) -> (f64, f64) {
    let measure = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((0.0, 0f64), |(sum, largest), x| (sum + x * x, largest.max(x.abs())))
    };
    let size = measure(&mut exact.iter().map(|&x| f64::from(x)));
    let off = measure(&mut out.iter().zip(exact).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    ((off.0 / size.0).sqrt(), off.1 / size.1)
}

fn markdown(all: &[Measured]) {
    let (f32, bf16) = (&all[0], &all[1]);
    println!(
        "| format | bytes an element | saved against bf16 | against f32 | error, RMS | error, largest | \
         decode against f32 | against bf16 | quantize against memcpy | dequantize |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for m in all {
        let (rms, largest) = errors(&m.out, &f32.out);
        let saved = |than: &Measured| 100.0 * (1.0 - m.bytes_per_element / than.bytes_per_element);
        let [quantize, dequantize] = m
            .conversions
            .map_or(["–", "–"].map(str::to_owned), |ratios| ratios.map(|ratio| format!("{ratio:.3}")));
        println!(
            "| {} | {:.4} | {:.1} % | {:.1} % | {rms:.1e} | {largest:.1e} | {:.2} | {:.2} | {quantize} | {dequantize} |",
            m.format,
            m.bytes_per_element,
            saved(bf16),
            saved(f32),
            f32.decode / m.decode,
            bf16.decode / m.decode,
        );
    }
}

fn main() -> Result<()> {
    let longest = option("--tokens", 32_768);
    for tokens in [longest / 8, longest / 2, longest] {
        let all = measure(tokens.next_multiple_of(BLOCK))?;
        if tokens == longest && std::env::args().any(|arg| arg == "--markdown") {
            markdown(&all);
        }
    }
    Ok(())
}

/// Measures all formats with a context of `tokens` tokens.
fn measure(tokens: usize) -> Result<Vec<Measured>> {
    let lab = Lab::new(tokens)?;
    let mut all = FORMATS.iter().map(|format| lab.measure(format.parse()?)).collect::<Result<Vec<_>>>()?;
    lab.decode_in_turns(&mut all);
    for m in &all[2..] {
        let bytes = (m.bytes_per_element * (lab.tokens * 2 * HEADS * DIM) as f64) as usize;
        let what = format!("attend, decode, GQA 4, {}", m.format);
        row(&what, bytes, m.decode, "the same in f32", all[0].decode);
        let (sweep, what) = (format!("{what}, against bf16"), format!("{what}, {tokens} tokens"));
        row_of_sweep(&sweep, &what, bytes, m.decode, "the same in bf16", all[1].decode);
    }
    Ok(all)
}
