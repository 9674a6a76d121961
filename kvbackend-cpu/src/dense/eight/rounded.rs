//! Rows rounded to eight bits.

use std::arch::x86_64::{
    _mm_storeu_si128, _mm512_cvtps_epi32, _mm512_cvtsepi32_epi8, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_reduce_add_epi32, _mm512_set1_ps,
};

use super::{BLOCK, ELEMENTS_PER_THREAD, step_of};
use crate::dense::{Matrix, Products, StoredType};
use crate::raw::Destination;
use crate::simd::avx512::Avx512;

/// Rows rounded to eight bits: codes, steps, and the sums of codes.
#[derive(Debug, Default)]
pub(super) struct RoundedRows {
    /// One code per element, row by row.
    codes: Vec<i8>,
    /// One step per block of 32 elements, row by row.
    steps: Vec<f32>,
    /// One number per group of elements that share a factor in the matrix, row by row: see [`sums`](Self::sums).
    sums: Vec<i32>,
    rows: usize,
    input: usize,
    group: usize,
}

impl RoundedRows {
    /// Creates a buffer without rows.
    pub(super) const fn new() -> Self {
        Self { codes: Vec::new(), steps: Vec::new(), sums: Vec::new(), rows: 0, input: 0, group: BLOCK }
    }

    /// Replaces the contents by the rows of `x`, rounded, to be multiplied by a matrix. Runs on the threads of
    /// `products`.
    ///
    /// # Safety
    /// The processor must support AVX-512 F, BW, DQ and VL.
    pub(super) unsafe fn round(
        &mut self,
        products: &Products,
        (x, rows): (&[f32], usize),
        matrix: &Matrix<'_>,
    ) {
        let (input, group) = (matrix.input, matrix.dtype.group_elements());
        assert!(x.len() == rows * input && input.is_multiple_of(BLOCK), "whole blocks");
        (self.rows, self.input, self.group) = (rows, input, group);
        // The buffers only grow, because every element that is read was written before.
        grow(&mut self.codes, x.len());
        grow(&mut self.steps, x.len() / BLOCK);
        grow(&mut self.sums, x.len() / group);
        let codes = Destination::new(bytemuck::cast_slice_mut(&mut self.codes[..]));
        let steps = Destination::new(bytemuck::cast_slice_mut(&mut self.steps[..]));
        let sums = Destination::new(bytemuck::cast_slice_mut(&mut self.sums[..]));
        let blocks = x.len() / BLOCK;
        let parts = products.workers.parts(blocks, x.len(), ELEMENTS_PER_THREAD);
        products.workers.run(parts, &|part| {
            let taken = blocks * part / parts..blocks * (part + 1) / parts;
            let (from, len) = (taken.start * BLOCK, taken.len() * BLOCK);
            let task = RoundBlocks {
                x: &x[from..from + len],
                codes: codes.at(from, len).cast(),
                steps: steps.at(4 * taken.start, 4 * taken.len()).cast(),
                sums: sums.at(4 * (from / group), 4 * (len / group)).cast(),
                dtype: matrix.dtype,
            };
            // SAFETY: the processor supports AVX-512 by contract. The three buffers have room for the blocks `taken`,
            // which no other part writes.
            unsafe { task.run() };
        });
    }

    /// Returns the number of rows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the codes of a row, starting at an element.
    pub(super) fn codes(&self, row: usize, element: usize) -> &[i8] {
        &self.codes[row * self.input + element..(row + 1) * self.input]
    }

    /// Returns the steps of a row, starting at the block of an element.
    pub(super) fn steps(&self, row: usize, element: usize) -> &[f32] {
        &self.steps[(row * self.input + element) / BLOCK..(row + 1) * self.input / BLOCK]
    }

    /// Returns a number per group of a row, starting at the group of an element. If the matrix's groups have minima,
    /// the number is the sum of the group's codes. Otherwise, the number is −128 times that sum, which cancels the
    /// offset of the matrix's codes.
    pub(super) fn sums(&self, row: usize, element: usize) -> &[i32] {
        &self.sums[(row * self.input + element) / self.group..(row + 1) * self.input / self.group]
    }
}

fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// Whole blocks that are rounded.
///
/// The pointers must be valid for writes of a code per element, a step per block and a sum per group, and no other code
/// may access them.
struct RoundBlocks<'a> {
    x: &'a [f32],
    codes: *mut i8,
    steps: *mut f32,
    sums: *mut i32,
    dtype: StoredType,
}

impl RoundBlocks<'_> {
    /// Rounds the blocks.
    ///
    /// # Safety
    /// The processor must support AVX-512 F, BW, DQ and VL, and the pointers must meet the conditions stated at the
    /// type.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run(self) {
        let group = self.dtype.group_elements();
        let factor = if self.dtype.has_minima() { 1_i32 } else { -128 };
        for (number, block) in self.x.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: this function is compiled for AVX-512. Both halves of the block have 16 elements, and the
            // pointers are valid for the block's codes, step and sums by contract.
            unsafe {
                let (step, inverse) = step_of::<Avx512>(block);
                let inverse = _mm512_set1_ps(inverse);
                for half in 0..2 {
                    let x = _mm512_mul_ps(_mm512_loadu_ps(block.as_ptr().add(16 * half)), inverse);
                    let codes = _mm512_cvtps_epi32(x);
                    let to = self.codes.add(number * BLOCK + 16 * half);
                    _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(codes));
                    let sum = _mm512_reduce_add_epi32(codes);
                    let at = self.sums.add((number * BLOCK + 16 * half) / group);
                    // A group has one half of the block or both.
                    let before = if group == BLOCK && half == 1 { at.read() } else { 0 };
                    // The codes of a block with a fault are the smallest numbers. Its step is no number, so no product is.
                    at.write(factor.wrapping_mul(sum).wrapping_add(before));
                }
                self.steps.add(number).write(step);
            }
        }
    }
}
