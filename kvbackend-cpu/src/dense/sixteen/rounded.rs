//! Rows rounded to bf16.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_maskz_loadu_ps, _mm512_storeu_si512,
};

use crate::dense::Products;
use crate::raw::Destination;

/// Number of elements per vector.
pub(super) const LANES: usize = 32;
/// Distance between elements that map to the same sets of the first-level cache, or to every other one of them.
const SAME_SETS: usize = 512;
/// The number of f32 elements that a thread rounds in the time that it takes to wake another thread.
const ELEMENTS_PER_THREAD: usize = 64 << 10;

/// Rows rounded to bf16. Each row is followed by zeros up to a whole vector.
#[derive(Debug, Default)]
pub(super) struct RoundedRows {
    elements: Vec<u16>,
    rows: usize,
    stride: usize,
}

impl RoundedRows {
    /// Creates a buffer without rows.
    pub(super) const fn new() -> Self {
        Self { elements: Vec::new(), rows: 0, stride: 0 }
    }

    /// Replaces the contents by the rows of `x`, rounded. Runs on the threads of `products`.
    ///
    /// # Safety
    /// The processor must support AVX-512 F, BW, DQ and VL, and `AVX512_BF16`.
    pub(super) unsafe fn round(&mut self, products: &Products, (x, rows): (&[f32], usize), input: usize) {
        assert!(x.len() == rows * input, "whole rows");
        let stride = input.next_multiple_of(LANES);
        // Rows at such distances would share few sets of the cache.
        self.stride = if stride.is_multiple_of(SAME_SETS) { stride + LANES } else { stride };
        self.rows = rows;
        // The buffer only grows, because every element that is read was written before.
        let len = rows * self.stride;
        if self.elements.len() < len {
            self.elements.resize(len, 0);
        }
        let bytes = 2 * self.stride;
        let to = Destination::new(bytemuck::cast_slice_mut(&mut self.elements[..len]));
        let parts = products.workers.parts(rows, x.len(), ELEMENTS_PER_THREAD);
        products.workers.run(parts, &|part| {
            for row in rows * part / parts..rows * (part + 1) / parts {
                // SAFETY: the processor supports the instructions by contract. There is room for the row, which no other
                // part writes.
                unsafe { round_row(&x[row * input..][..input], to.at(row * bytes, bytes).cast()) };
            }
        });
    }

    /// Returns the number of rows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the elements of a row, and zeros up to a whole vector.
    pub(super) fn row(&self, row: usize) -> &[u16] {
        &self.elements[row * self.stride..][..self.stride]
    }
}

/// Rounds a row, and writes zeros behind it up to a whole vector.
///
/// # Safety
/// The processor must support AVX-512 F, BW, DQ and VL, and `AVX512_BF16`. `to` must be valid for writes of the row's
/// elements, up to a whole vector.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn round_row(row: &[f32], to: *mut u16) {
    for (number, chunk) in row.chunks(LANES).enumerate() {
        // SAFETY: whole vectors are loaded from whole chunks, and otherwise a mask limits the loads to the chunk. There is
        // room for the vector.
        unsafe {
            let from = chunk.as_ptr();
            let (low, high) = if chunk.len() == LANES {
                (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)))
            } else {
                let lanes = (1u32 << chunk.len()) - 1;
                let high = _mm512_maskz_loadu_ps((lanes >> 16) as u16, from.wrapping_add(16));
                (_mm512_maskz_loadu_ps(lanes as u16, from), high)
            };
            let narrow: __m512bh = _mm512_cvtne2ps_pbh(high, low);
            let narrow = std::mem::transmute::<__m512bh, __m512i>(narrow);
            _mm512_storeu_si512(to.add(number * LANES).cast(), narrow);
        }
    }
}
