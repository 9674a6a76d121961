//! Weights on the device, in the format of their file.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kvcore::{Error, MemoryKind, Result, Storage};

use super::{CudaSteps, narrow};
use crate::driver::NAME;
use crate::memory::CudaStorage;

/// A weight's stored type. Quantised types use ggml's blocks along the last axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredKind {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16.
    BF16,
    /// 32 elements in 34 bytes: an f16 scale and 32 signed bytes.
    Q8_0,
    /// 256 elements in 144 bytes: two f16 factors, eight 6-bit scales and minima, and 256 4-bit elements.
    Q4K,
}

/// A weight matrix `[rows, width]` on the device.
#[derive(Debug)]
pub struct CudaWeight {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) kind: StoredKind,
    pub(super) rows: usize,
    pub(super) width: usize,
    /// The offsets of the codes, scales and factors, in bytes.
    parts: [usize; 3],
}

/// A weight, as declared in `weight.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct WeightArgs {
    codes: u64,
    scales: u64,
    factors: u64,
    width: u32,
    kind: u32,
}

impl WeightArgs {
    /// Describes rows of f32 activations as if they were a weight.
    pub(super) fn of_rows(address: u64, width: usize) -> Result<Self> {
        let kind = StoredKind::F32.number();
        Ok(Self { codes: address, scales: 0, factors: 0, width: narrow(width)?, kind })
    }
}

impl StoredKind {
    /// Returns the number of elements and the number of bytes per block.
    const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
        }
    }

    /// Returns the type's constant in `weight.cuh`.
    const fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::BF16 => 2,
            Self::Q8_0 => 16,
            Self::Q4K => 17,
        }
    }
}

impl CudaWeight {
    /// Returns the weight's size on the device, in bytes.
    pub fn bytes(&self) -> usize {
        self.storage.len()
    }

    /// Returns the number of rows and the number of elements per row.
    pub fn extents(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    pub(super) fn args(&self) -> Result<WeightArgs> {
        let at = |part: usize| self.storage.address() + self.parts[part] as u64;
        Ok(WeightArgs {
            codes: at(0),
            scales: at(1),
            factors: at(2),
            width: narrow(self.width)?,
            kind: self.kind.number(),
        })
    }

    /// Returns the address of the first element. The weight's type must not have blocks.
    pub(super) fn address(&self) -> u64 {
        self.storage.address() + self.parts[0] as u64
    }
}

/// The alignment of each part of a weight, in bytes.
const ALIGN: usize = 256;

impl CudaSteps {
    /// Copies a weight with `rows` rows of `width` elements to the device. The codes of quantised blocks are
    /// stored apart from their scales, so that kernels can read the codes in wide words.
    ///
    /// # Errors
    /// Returns [`Error::NotMultiple`] if rows do not consist of whole blocks, [`Error::Mismatch`] if `bytes`
    /// has the wrong length, or a device error.
    pub fn weight(&self, kind: StoredKind, rows: usize, width: usize, bytes: &[u8]) -> Result<CudaWeight> {
        let (elements, size) = kind.block();
        if !width.is_multiple_of(elements) {
            return Err(Error::NotMultiple { what: "width of a stored weight", value: width, of: elements });
        }
        let blocks =
            (width / elements).checked_mul(rows).ok_or(Error::Overflow { what: "blocks of a weight" })?;
        let expected = blocks.checked_mul(size).ok_or(Error::Overflow { what: "bytes of a weight" })?;
        if expected != bytes.len() || expected == 0 {
            return Err(Error::mismatch("bytes of a stored weight", expected, bytes.len()));
        }
        let [codes, scales, factors] = match kind {
            StoredKind::Q8_0 => q8_0(bytes),
            StoredKind::Q4K => q4_k(bytes),
            _ => [bytes.to_vec(), Vec::new(), Vec::new()],
        };
        let second = codes.len().next_multiple_of(ALIGN);
        let third = (second + scales.len()).next_multiple_of(ALIGN);
        let mut all = codes;
        all.resize(second, 0);
        all.extend(scales);
        all.resize(third, 0);
        all.extend(factors);
        let storage = CudaStorage::allocate(&self.device, MemoryKind::Device, all.len())?;
        storage.fill(&all)?;
        Ok(CudaWeight { storage: Arc::new(storage), kind, rows, width, parts: [0, second, third] })
    }

    /// Checks that a weight has the given number of rows and the given width.
    pub(super) fn check(what: &'static str, weight: &CudaWeight, rows: usize, width: usize) -> Result<()> {
        for (expected, got) in [(rows, weight.rows), (width, weight.width)] {
            if expected != got {
                return Err(Error::mismatch(what, expected, got));
            }
        }
        Ok(())
    }

    /// Returns the address of a weight, after checking that it is a vector of `width` f32 values.
    pub(super) fn vector(weight: &CudaWeight, width: usize) -> Result<u64> {
        Self::check("numbers of a vector", weight, 1, width)?;
        match weight.kind {
            StoredKind::F32 => Ok(weight.address()),
            other => {
                let what = format!("a vector in {other:?}; norms and biases are f32");
                Err(Error::Unsupported { backend: NAME, what })
            }
        }
    }
}

/// Returns the codes and the scales of `Q8_0` blocks, as two contiguous lists.
fn q8_0(bytes: &[u8]) -> [Vec<u8>; 3] {
    let (mut codes, mut scales) = (Vec::with_capacity(bytes.len()), Vec::new());
    for block in bytes.chunks_exact(34) {
        scales.extend_from_slice(&block[..2]);
        codes.extend_from_slice(&block[2..]);
    }
    [codes, scales, Vec::new()]
}

/// Returns the codes, the scales with the minima, and the factors of `Q4_K` blocks. The codes are in element
/// order, two per byte.
fn q4_k(bytes: &[u8]) -> [Vec<u8>; 3] {
    let (mut codes, mut scales, mut factors) = (Vec::with_capacity(bytes.len()), Vec::new(), Vec::new());
    for block in bytes.chunks_exact(144) {
        let (head, quarters) = block.split_at(16);
        factors.extend_from_slice(&head[..4]);
        let packed = &head[4..];
        for group in 0..8 {
            // Scales and minima have six bits each. For the first four groups, they are the low bits of the
            // first eight bytes. For the last four groups, they consist of the halves of the last four
            // bytes and the upper two bits of the first eight.
            let (scale, minimum) = if group < 4 {
                (packed[group] & 63, packed[group + 4] & 63)
            } else {
                (
                    packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
                    packed[group + 4] >> 4 | packed[group] >> 6 << 4,
                )
            };
            scales.extend([scale, minimum]);
        }
        // Each quarter has 32 bytes. The low halves of the bytes contain one group, and the high halves
        // contain the next group.
        for quarter in quarters.chunks_exact(32) {
            for shift in [0, 4] {
                codes.extend(
                    quarter.chunks_exact(2).map(|two| (two[0] >> shift & 15) | (two[1] >> shift & 15) << 4),
                );
            }
        }
    }
    [codes, scales, factors]
}
