//! The workbench for a case: a backend, a stream, an element type, and deterministic numbers.

use std::fmt;
use std::sync::Arc;

use half::{bf16, f16};
use kvcore::{
    Backend, BlockOrder, DType, Fp8Kind, KvArena, KvFormat, KvLayout, KvPlane, KvShape, MemoryKind, Storage,
    Stream, TensorView, allocate_tensor,
};

use crate::oracle;

/// The reason why a case failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// A description of the expected and the actual result.
    pub message: String,
    /// The backend error that ended the case, if there was one.
    pub error: Option<kvcore::Error>,
}

impl Failure {
    /// Creates a failure without a backend error.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), error: None }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<kvcore::Error> for Failure {
    fn from(error: kvcore::Error) -> Self {
        Self { message: format!("unexpected error: {error}"), error: Some(error) }
    }
}

/// The result of a case.
pub type Outcome<T = ()> = Result<T, Failure>;

/// A backend under test, with a stream and an element type.
#[derive(Debug, Clone)]
pub struct Bench {
    /// The backend under test.
    pub backend: Arc<dyn Backend>,
    /// A stream of the backend.
    pub stream: Arc<dyn Stream>,
    /// The element type under test.
    pub dtype: DType,
}

impl Bench {
    /// Creates a bench for a backend and an element type.
    pub fn new(backend: Arc<dyn Backend>, dtype: DType) -> kvcore::Result<Self> {
        let stream = backend.stream()?;
        Ok(Self { backend, stream, dtype })
    }

    /// Allocates a zeroed tensor on the device.
    pub fn tensor(&self, dtype: DType, shape: &[usize]) -> Outcome<TensorView> {
        Ok(allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, shape)?)
    }

    /// Allocates a tensor with the given values, rounded to `dtype`.
    pub fn upload(&self, dtype: DType, shape: &[usize], values: &[f32]) -> Outcome<TensorView> {
        let view = self.tensor(dtype, shape)?;
        self.stream.write(&view, &encode(dtype, values))?;
        Ok(view)
    }

    /// Returns the values of a contiguous tensor.
    pub fn download(&self, view: &TensorView) -> Outcome<Vec<f32>> {
        let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
        self.stream.read(view, &mut bytes)?;
        Ok(decode(view.dtype(), &bytes))
    }

    /// Allocates an arena with the suite's usual extents and the given block order.
    pub fn arena(&self, order: BlockOrder) -> Outcome<KvArena> {
        self.arena_of(KvShape {
            num_layers: 2,
            num_blocks: 9,
            block_size: 4,
            k_heads: 2,
            v_heads: 2,
            k_dim: 10,
            v_dim: 6,
            format: self.dtype.into(),
            order,
        })
    }

    /// Allocates an arena with the given shape.
    pub fn arena_of(&self, shape: KvShape) -> Outcome<KvArena> {
        let layout = Arc::new(KvLayout::new(shape)?);
        Ok(KvArena::allocate(self.backend.as_ref(), MemoryKind::Device, layout)?)
    }

    /// Returns the values of all of K and all of V, each at the index of its element or code, for cases that
    /// check every byte.
    pub fn contents(&self, arena: &KvArena) -> Outcome<(Vec<f32>, Vec<f32>)> {
        let values = |plane: KvPlane, bytes: usize| {
            let codes = self.raw(plane.storage, bytes)?;
            match (plane.format, plane.scales) {
                (KvFormat::Dense(dtype), _) => Ok(decode(dtype, &codes)),
                (_, Some((storage, scales))) => {
                    let scales = self.raw(storage, scales.bytes)?;
                    Ok(oracle::dequantized(arena.layout(), &plane, &codes, &scales))
                }
                (format, None) => Err(Failure::new(format!("an arena of {format} without scales"))),
            }
        };
        let layout = arena.layout();
        Ok((values(arena.k_plane(), layout.k_bytes())?, values(arena.v_plane(), layout.v_bytes())?))
    }

    /// Returns the first `len` bytes of a storage.
    fn raw(&self, storage: &Arc<dyn Storage>, len: usize) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.stream.read(&TensorView::new(Arc::clone(storage), DType::U8, &[len])?, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills K and V with finite numbers, codes and scales, and returns the stored values.
    pub fn fill(&self, arena: &KvArena, seed: u32) -> Outcome<(Vec<f32>, Vec<f32>)> {
        let layout = arena.layout();
        for (plane, bytes, seed) in
            [(arena.k_plane(), layout.k_bytes(), seed), (arena.v_plane(), layout.v_bytes(), !seed)]
        {
            let write = |storage: &Arc<dyn Storage>, bytes: &[u8]| {
                let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()])?;
                self.stream.write(&view, bytes)
            };
            match plane.format {
                KvFormat::Dense(dtype) => {
                    write(plane.storage, &encode(dtype, &numbers(seed, bytes * 8 / dtype.bits())))?;
                }
                format => write(plane.storage, &codes(format, seed, bytes))?,
            }
            if let Some((storage, scales)) = plane.scales {
                let n = scales.bytes * 8 / scales.dtype.bits();
                let values: Vec<f32> = numbers(seed ^ 1, n).iter().map(|x| 0.004 * (1.5 + x)).collect();
                write(storage, &encode(scales.dtype, &values))?;
            }
        }
        self.contents(arena)
    }
}

/// Returns codes in a quantised format. Their values are finite and of moderate size.
fn codes(format: KvFormat, seed: u32, bytes: usize) -> Vec<u8> {
    let finite = |byte: u8| match format {
        KvFormat::Int8 { .. } if byte == 0x80 => 1,
        KvFormat::Int4 { .. } => [byte & 0xf, byte >> 4]
            .map(|nibble| if nibble == 8 { 1 } else { nibble })
            .iter()
            .rev()
            .fold(0, |byte, nibble| byte << 4 | nibble),
        KvFormat::Fp8 { kind: Fp8Kind::E4M3, .. } => byte & 0xdf,
        KvFormat::Fp8 { kind: Fp8Kind::E5M2, .. } => byte & 0xcf,
        _ => byte,
    };
    numbers(seed, bytes).iter().map(|x| finite((127.5 + 127.5 * x) as u8)).collect()
}

/// Returns the largest relative error of rounding to nearest, which is half the element type's spacing.
pub(crate) fn half_spacing(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1.0 / 2048.0,
        DType::BF16 => 1.0 / 256.0,
        _ => 0.0,
    }
}

/// Checks that `actual` is `expected`, computed in f32 and rounded once to nearest. Allows half a spacing and
/// a little extra for f32 arithmetic. Truncation would have twice that error, and fails.
pub(crate) fn rounded_once(what: &str, dtype: DType, actual: &[f32], expected: &[f32]) -> Outcome {
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let allowed = half_spacing(dtype) * e.abs() + 1e-5;
        let near = (a - e).abs() <= allowed;
        if !near {
            return Err(Failure::new(format!("{what}: element {i} is {a}, expected {e} within {allowed}")));
        }
    }
    ensure(actual.len() == expected.len(), || {
        format!("{what}: {} values, expected {}", actual.len(), expected.len())
    })
}

/// Returns `n` numbers between −1 and 1 that depend only on the seed.
pub(crate) fn numbers(seed: u32, n: usize) -> Vec<f32> {
    let mut state = u64::from(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// Returns values rounded to an element type, as f32.
pub(crate) fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    decode(dtype, &encode(dtype, values))
}

/// Encodes values as bytes of an element type.
pub(crate) fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
    }
}

/// Decodes bytes of an element type to values.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DType::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// Checks that `actual` equals `expected`, element by element. Any NaN equals any other NaN.
pub(crate) fn equal(what: &str, actual: &[f32], expected: &[f32]) -> Outcome {
    close(what, actual, expected, 0.0)
}

/// Checks that `actual` is within `tolerance` of `expected`. The tolerance is relative for values above 1.
pub(crate) fn close(what: &str, actual: &[f32], expected: &[f32], tolerance: f32) -> Outcome {
    if actual.len() != expected.len() {
        return Err(Failure::new(format!("{what}: {} values, expected {}", actual.len(), expected.len())));
    }
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let same = a == e || (a.is_nan() && e.is_nan());
        let near = (a - e).abs() <= tolerance * e.abs().max(1.0);
        if !same && !near {
            return Err(Failure::new(format!("{what}: element {i} is {a}, expected {e} within {tolerance}")));
        }
    }
    Ok(())
}

/// Returns a failure unless `condition` is true.
pub(crate) fn ensure(condition: bool, what: impl FnOnce() -> String) -> Outcome {
    if condition { Ok(()) } else { Err(Failure::new(what())) }
}
