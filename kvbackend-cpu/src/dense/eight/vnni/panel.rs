//! Panels: sixteen matrix rows side by side, in codes of eight bits.
//!
//! ```text
//! one group of 16 or 32 elements:  4 elements of 16 rows │ the next 4 of 16 rows │ … │ 16 factors │ 16 minima, if any
//!                                  └───── one line ─────┘
//! ```
//!
//! Codes are unsigned. In types without minima, whose codes are signed, 128 is added to each.

use std::arch::x86_64::{
    __m512, _mm_cvtss_f32, _mm_storeu_si128, _mm256_loadu_si256, _mm512_add_epi32, _mm512_castps512_ps128,
    _mm512_castsi256_si512, _mm512_castsi512_ps, _mm512_cvtepi32_epi8, _mm512_cvtps_epi32,
    _mm512_inserti64x4, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_xor_si512,
};
use std::ops::Range;

use crate::dense::stored::{self, BlockFactors, Sink};
use crate::dense::{Matrix, StoredType};
use crate::simd::Simd;
use crate::simd::avx512::Avx512;

/// Number of matrix rows per panel.
pub(super) const WIDTH: usize = 16;
/// Number of bytes per vector.
pub(super) const LINE: usize = 64;

/// The layout of a panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelLayout {
    /// The number of elements per group, 16 or 32.
    pub(super) group: usize,
    /// The number of groups per matrix row.
    pub(super) groups: usize,
    /// True if each group has minima.
    pub(super) has_minima: bool,
}

impl PanelLayout {
    /// Returns the layout for `depth` elements of a type, which must be whole blocks.
    pub(super) fn new(dtype: StoredType, depth: usize) -> Self {
        let group = dtype.group_elements();
        Self { group, groups: depth / group, has_minima: dtype.has_minima() }
    }

    /// Returns the number of bytes per group.
    pub(super) fn group_bytes(self) -> usize {
        (self.group / 4 + 1 + usize::from(self.has_minima)) * LINE
    }

    /// Returns the number of bytes per panel.
    pub(super) fn bytes(self) -> usize {
        self.groups * self.group_bytes()
    }

    /// Builds the panels of up to 32 matrix rows in `memory`, and returns their address. The contents of missing rows are
    /// those of a row before.
    ///
    /// # Safety
    /// The matrix must have the rows and the elements, which must be those of this layout. The caller must be compiled for
    /// AVX-512.
    #[inline(always)]
    pub(super) unsafe fn build(
        self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        elements: Range<usize>,
        memory: &mut Vec<f32>,
    ) -> *const u8 {
        // Two panels, and one panel's decoded rows. Rows of codes and of factors are padded to whole squares.
        let codes = (self.groups * self.group / 4).next_multiple_of(WIDTH);
        let factors = self.groups.next_multiple_of(WIDTH);
        let len = 2 * self.bytes() / 4 + WIDTH * (codes + 2 * factors) + LINE / 4;
        if memory.len() < len {
            memory.resize(len, 0.0);
        }
        let start = memory.as_ptr().align_offset(LINE);
        let (panels, decoded) = memory[start..].split_at_mut(2 * self.bytes() / 4);
        let (of_codes, rest) = decoded.split_at_mut(WIDTH * codes);
        let (of_factors, of_minima) = rest.split_at_mut(WIDTH * factors);
        let lines = self.group / 4;
        for (panel, first) in panels.chunks_exact_mut(self.bytes() / 4).zip(rows.clone().step_by(WIDTH)) {
            let to = panel.as_mut_ptr().cast::<u8>();
            if matrix.dtype == StoredType::Q8_0 {
                // SAFETY: the matrix has the rows and the elements, which are those of this panel.
                unsafe { self.put_bytes(matrix, first..rows.end.min(first + WIDTH), &elements, to) };
                continue;
            }
            for (at, row) in (first..rows.end.min(first + WIDTH)).enumerate() {
                let mut decode = DecodeRow {
                    codes: of_codes[at * codes..].as_mut_ptr().cast(),
                    factors: of_factors[at * factors..].as_mut_ptr(),
                    minima: of_minima[at * factors..].as_mut_ptr(),
                    group: self.group,
                    offset: if self.has_minima { 0 } else { 128 },
                };
                // SAFETY: the row has the elements, and there is room for their codes, factors and minima.
                unsafe { decode.blocks(matrix.dtype, matrix.elements(row, &elements)) };
            }
            // SAFETY: the rows of all three are `WIDTH` rows of whole squares, and the panel has the lines.
            unsafe {
                columns(of_codes.as_ptr(), codes, self.groups * lines, |word| {
                    to.add(word / lines * self.group_bytes() + word % lines * LINE).cast()
                });
                let of_group = |group, line| to.add(group * self.group_bytes() + line * LINE).cast();
                columns(of_factors.as_ptr(), factors, self.groups, |group| of_group(group, lines));
                if self.has_minima {
                    columns(of_minima.as_ptr(), factors, self.groups, |group| of_group(group, lines + 1));
                }
            }
        }
        panels.as_ptr().cast()
    }
}

/// The number of bytes per block of `Q8_0`: an f16 scale, and 32 codes.
const Q8_0: usize = 34;

impl PanelLayout {
    /// Builds the panel of up to 16 matrix rows of `Q8_0`, whose codes only get their offset.
    ///
    /// # Safety
    /// The same as for [`build`](Self::build). `to` must be valid for writes of the panel.
    #[inline(always)]
    unsafe fn put_bytes(self, matrix: &Matrix<'_>, rows: Range<usize>, elements: &Range<usize>, to: *mut u8) {
        let last = rows.len() - 1;
        let rows: [*const u8; WIDTH] =
            std::array::from_fn(|i| matrix.elements(rows.start + i.min(last), elements).as_ptr());
        for group in (0..self.groups).step_by(2) {
            // If there is no second block, the first one takes its place, and is not stored.
            let second = if group + 1 < self.groups { Q8_0 } else { 0 };
            let count = 1 + usize::from(second > 0);
            // SAFETY: each row has both blocks, and the panel has as many groups.
            unsafe {
                let mut square = [_mm512_setzero_ps(); WIDTH];
                let mut scales = [[0u16; WIDTH]; 2];
                for (i, row) in rows.into_iter().enumerate() {
                    let block = row.add(group * Q8_0);
                    let low = _mm256_loadu_si256(block.add(2).cast());
                    let high = _mm256_loadu_si256(block.add(second + 2).cast());
                    let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                    square[i] = _mm512_castsi512_ps(_mm512_xor_si512(codes, _mm512_set1_epi8(-128)));
                    scales[0][i] = u16::from_le(block.cast::<u16>().read_unaligned());
                    scales[1][i] = u16::from_le(block.add(second).cast::<u16>().read_unaligned());
                }
                Avx512::transpose(&mut square);
                for at in 0..count {
                    let to = to.add((group + at) * self.group_bytes());
                    for (line, vector) in square[8 * at..][..8].iter().enumerate() {
                        Avx512::store(to.add(line * LINE).cast(), *vector);
                    }
                    Avx512::store(to.add(8 * LINE).cast(), Avx512::load_f16(scales[at].as_ptr()));
                }
            }
        }
    }
}

/// Writes the first `count` columns of a matrix of 16 rows of `stride` words each to the places that `to` returns.
///
/// # Safety
/// The rows must be valid for reads, and `stride` must be a multiple of 16. The places must be valid for writes of a
/// vector. The caller must be compiled for AVX-512.
#[inline(always)]
unsafe fn columns(rows: *const f32, stride: usize, count: usize, to: impl Fn(usize) -> *mut f32) {
    for from in (0..count).step_by(WIDTH) {
        // SAFETY: the square is inside the rows, since `stride` is a multiple of 16.
        unsafe {
            let mut square: [__m512; WIDTH] = [_mm512_setzero_ps(); WIDTH];
            for (row, vector) in square.iter_mut().enumerate() {
                *vector = Avx512::load(rows.add(row * stride + from));
            }
            Avx512::transpose(&mut square);
            for (column, vector) in (from..count).zip(square) {
                Avx512::store(to(column), vector);
            }
        }
    }
}

/// Decodes a matrix row to codes, factors and minima.
///
/// The pointers must be valid for writes of a code per element, and of a factor and a minimum per group.
struct DecodeRow {
    codes: *mut u8,
    factors: *mut f32,
    minima: *mut f32,
    group: usize,
    /// The number that is added to each code.
    offset: i32,
}

/// Decodes each block, and moves the row's pointers to the next one.
macro_rules! each_block {
    ($row:expr, $bytes:expr, $read:ident of $elements:literal) => {
        for block in $bytes.as_chunks().0 {
            stored::$read::<Avx512, DecodeRow>(block, $row);
            $row.skip($elements);
        }
    };
}

impl DecodeRow {
    /// Decodes whole blocks. Floats are not decoded.
    ///
    /// # Safety
    /// The pointers must have room for the blocks. The caller must be compiled for AVX-512.
    #[inline(always)]
    unsafe fn blocks(&mut self, dtype: StoredType, bytes: &[u8]) {
        // SAFETY: as by contract.
        unsafe {
            match dtype {
                StoredType::F32 | StoredType::F16 | StoredType::BF16 => {}
                StoredType::Q8_0 => each_block!(self, bytes, q8_0 of 32),
                StoredType::Q4_0 => each_block!(self, bytes, q4_0 of 32),
                StoredType::Iq4Nl => each_block!(self, bytes, iq4_nl of 32),
                StoredType::Q4_1 => each_block!(self, bytes, q4_1 of 32),
                StoredType::Q5_0 => each_block!(self, bytes, q5_0 of 32),
                StoredType::Q5_1 => each_block!(self, bytes, q5_1 of 32),
                StoredType::Q2K => each_block!(self, bytes, q2_k of 256),
                StoredType::Q3K => each_block!(self, bytes, q3_k of 256),
                StoredType::Q4K => each_block!(self, bytes, q4_k of 256),
                StoredType::Q5K => each_block!(self, bytes, q5_k of 256),
                StoredType::Q6K => each_block!(self, bytes, q6_k of 256),
            }
        }
    }

    /// Moves the pointers past a block.
    #[inline(always)]
    fn skip(&mut self, elements: usize) {
        self.codes = self.codes.wrapping_add(elements);
        self.factors = self.factors.wrapping_add(elements / self.group);
        self.minima = self.minima.wrapping_add(elements / self.group);
    }
}

impl Sink<Avx512> for DecodeRow {
    #[inline(always)]
    unsafe fn take(&mut self, group: BlockFactors<__m512>, i: usize, q: __m512, sum: __m512) -> __m512 {
        // SAFETY: the elements are inside the block by contract, for whose codes there is room.
        unsafe {
            let codes = _mm512_add_epi32(_mm512_cvtps_epi32(q), _mm512_set1_epi32(self.offset));
            _mm_storeu_si128(self.codes.add(group.at + i).cast(), _mm512_cvtepi32_epi8(codes));
        }
        sum
    }

    #[inline(always)]
    unsafe fn end(&mut self, group: BlockFactors<__m512>, _: usize, _: __m512) {
        // SAFETY: the caller is compiled for AVX-512.
        let first = |vector| unsafe { _mm_cvtss_f32(_mm512_castps512_ps128(vector)) };
        // SAFETY: there is room for a factor and a minimum per group.
        unsafe {
            self.factors.add(group.at / self.group).write(first(group.factor));
            if let Some(minimum) = group.minimum {
                self.minima.add(group.at / self.group).write(first(minimum));
            }
        }
    }
}
