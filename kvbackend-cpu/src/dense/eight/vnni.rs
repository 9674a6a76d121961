//! Products of rounded rows and a matrix in blocks, by the instructions of `AVX512_VNNI`.
//!
//! Sixteen matrix rows at a time become a [`panel`], which is multiplied by all rows. One instruction multiplies four
//! codes of each of the sixteen matrix rows by the same four codes of a row, and adds the four products to a sum.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _mm512_add_ps, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
};
use std::cell::RefCell;
use std::ops::Range;

use super::rounded::RoundedRows;
use super::{BLOCK, has_dot_products};
use crate::dense::{Matrix, Products, StoredType, in_parts};
use crate::raw::Destination;
use crate::simd::SimdLevel;
use panel::{LINE, PanelLayout, WIDTH};

mod panel;

/// Maximum number of a row's elements per panel. Two panels stay in the first-level cache. A multiple of every
/// stored type's number of elements per block.
const DEPTH: usize = 768;
/// Approximate number of row elements to multiply by a panel before the next panel is built. Their codes stay in the
/// second-level cache.
const ELEMENTS: usize = 768 << 10;
/// Maximum number of rows per tile. With two panels, their sums take 24 of 32 registers.
const TILE: usize = 6;
/// A multiple of every stored type's number of elements per block.
const LARGEST_BLOCK: usize = 256;

thread_local! {
    /// This thread's panels.
    static PANELS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Returns whether a level may use the instructions, the processor has them, and so many rows are worth a panel.
pub(super) fn is_worthwhile(level: SimdLevel, rows: usize, dtype: StoredType) -> bool {
    // The codes of other types take longer to unpack.
    let fewest = if dtype == StoredType::Q8_0 { 2 } else { 4 };
    rows >= fewest && has_dot_products(level)
}

/// Writes the products of rounded rows and a matrix to `y`.
///
/// # Safety
/// [`is_worthwhile`] must be true for the level, and `y` must have a row of `matrix.out` f32 elements for each rounded row.
pub(super) unsafe fn multiply(
    products: &Products,
    rows: &RoundedRows,
    matrix: &Matrix<'_>,
    y: Destination<'_>,
) {
    let threads = products.threads(matrix, rows.rows());
    in_parts((&products.workers, threads), matrix.out, 2 * WIDTH, &|columns| {
        PANELS.with_borrow_mut(|memory| {
            // SAFETY: the instructions are available and `y` has the rows by contract. No other part has these columns.
            unsafe { VnniPart { rows, matrix, y }.run(columns, memory) };
        });
    });
}

/// The operands and the products of a range of columns.
struct VnniPart<'a> {
    rows: &'a RoundedRows,
    matrix: &'a Matrix<'a>,
    y: Destination<'a>,
}

impl VnniPart<'_> {
    /// Computes a range of columns of `y`.
    ///
    /// # Safety
    /// The processor must support AVX-512 with VNNI. `y` must have a row for each rounded row, and no other code may
    /// access these columns.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run(&self, columns: Range<usize>, memory: &mut Vec<f32>) {
        let (rows, input) = (self.rows.rows(), self.matrix.input);
        // The rows and their elements are split into runs and parts of about equal length.
        let runs = (rows * input).div_ceil(ELEMENTS).min(rows.div_ceil(TILE));
        let depths = input.div_ceil(DEPTH);
        let depth = |i: usize| (input * i / depths).next_multiple_of(LARGEST_BLOCK).min(input);
        for run in 0..runs {
            let taken = rows * run / runs..rows * (run + 1) / runs;
            for from in columns.clone().step_by(2 * WIDTH) {
                let columns = from..(from + 2 * WIDTH).min(columns.end);
                for depth in (0..depths).map(|i| depth(i)..depth(i + 1)) {
                    let layout = PanelLayout::new(self.matrix.dtype, depth.len());
                    let halves = columns.len().div_ceil(WIDTH);
                    // SAFETY: this function is compiled for AVX-512. The columns are matrix rows, and `depth` consists of
                    // whole blocks. The tiles are inside `taken` and `columns`.
                    unsafe {
                        let panels = layout.build(self.matrix, columns.clone(), depth.clone(), memory);
                        for at in taken.clone().step_by(TILE) {
                            let count = TILE.min(taken.end - at);
                            let tile = VnniTile { part: self, layout, panels, first: at, depth: depth.start };
                            match halves {
                                1 => tile.of::<1>(count, columns.clone()),
                                _ => tile.of::<2>(count, columns.clone()),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A few rows that are multiplied by one panel or two.
#[derive(Clone, Copy)]
struct VnniTile<'a> {
    part: &'a VnniPart<'a>,
    layout: PanelLayout,
    panels: *const u8,
    /// The first of the rows.
    first: usize,
    /// The row element that the panels begin with.
    depth: usize,
}

impl VnniTile<'_> {
    /// Multiplies `count` rows by `P` panels.
    ///
    /// # Safety
    /// There must be `count` rows starting at the tile's first row, at most [`TILE`], and `P` panels of the layout. The
    /// columns must belong to the part. The caller must be compiled for AVX-512 with VNNI.
    #[inline(always)]
    unsafe fn of<const P: usize>(self, count: usize, columns: Range<usize>) {
        // SAFETY: as by contract.
        unsafe {
            match count {
                1 => self.store(self.sums::<1, P>(), columns),
                2 => self.store(self.sums::<2, P>(), columns),
                3 => self.store(self.sums::<3, P>(), columns),
                4 => self.store(self.sums::<4, P>(), columns),
                5 => self.store(self.sums::<5, P>(), columns),
                _ => self.store(self.sums::<6, P>(), columns),
            }
        }
    }

    /// Returns the products of `R` rows and `P` panels.
    ///
    /// # Safety
    /// The same as for [`of`](Self::of), with `R` rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn sums<const R: usize, const P: usize>(self) -> [[__m512; P]; R] {
        let Self { part, layout, panels, first, depth } = self;
        let of = |r: usize| first + r;
        let codes: [_; R] = std::array::from_fn(|r| part.rows.codes(of(r), depth).as_ptr().cast::<i32>());
        let steps: [_; R] = std::array::from_fn(|r| part.rows.steps(of(r), depth).as_ptr());
        let of_groups: [_; R] = std::array::from_fn(|r| part.rows.sums(of(r), depth).as_ptr());
        let (words, blocks) = (layout.group / 4, BLOCK / layout.group);
        let mut sums = [[_mm512_setzero_ps(); P]; R];
        for group in 0..layout.groups {
            // SAFETY: each panel has the group's codes, factors and minima, and each row has the group's codes, step and
            // sum. Vector loads need no alignment, and neither do words of codes.
            unsafe {
                let at: [_; P] =
                    std::array::from_fn(|p| panels.add(p * layout.bytes() + group * layout.group_bytes()));
                let mut dots = [[_mm512_setzero_si512(); P]; R];
                if !layout.has_minima {
                    for (dots, of_groups) in dots.iter_mut().zip(of_groups) {
                        *dots = [_mm512_set1_epi32(*of_groups.add(group)); P];
                    }
                }
                for word in 0..words {
                    let columns: [__m512i; P] = at.map(|at| _mm512_loadu_si512(at.add(word * LINE).cast()));
                    for (dots, codes) in dots.iter_mut().zip(codes) {
                        let x = _mm512_set1_epi32(codes.add(group * words + word).read_unaligned());
                        for (dot, column) in dots.iter_mut().zip(columns) {
                            *dot = _mm512_dpbusd_epi32(*dot, column, x);
                        }
                    }
                }
                let factors = at.map(|at| _mm512_loadu_ps(at.add(words * LINE).cast()));
                for r in 0..R {
                    let step = _mm512_set1_ps(*steps[r].add(group / blocks));
                    for p in 0..P {
                        let factor = _mm512_mul_ps(factors[p], step);
                        sums[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][p]), factor, sums[r][p]);
                    }
                }
                if layout.has_minima {
                    let minima = at.map(|at| _mm512_loadu_ps(at.add((words + 1) * LINE).cast()));
                    for r in 0..R {
                        let sum = *steps[r].add(group / blocks) * *of_groups[r].add(group) as f32;
                        for p in 0..P {
                            sums[r][p] = _mm512_fmadd_ps(minima[p], _mm512_set1_ps(sum), sums[r][p]);
                        }
                    }
                }
            }
        }
        sums
    }

    /// Writes products to a range of columns of `y`, or adds them if the panels do not begin with the rows' first
    /// element.
    ///
    /// # Safety
    /// The same as for [`of`](Self::of), with `R` rows. There must be `P` vectors' columns.
    #[inline(always)]
    unsafe fn store<const R: usize, const P: usize>(self, sums: [[__m512; P]; R], columns: Range<usize>) {
        let out = self.part.matrix.out;
        let y = self.part.y.at(4 * self.first * out, 4 * R * out).cast::<f32>();
        for (r, sums) in sums.into_iter().enumerate() {
            for (p, mut sum) in sums.into_iter().enumerate() {
                let taken = columns.len().saturating_sub(p * WIDTH).min(WIDTH);
                let lanes = ((1u32 << taken) - 1) as __mmask16;
                // SAFETY: the mask selects only columns of the part, in a row of `y`.
                unsafe {
                    let to = y.add(r * out + columns.start + p * WIDTH);
                    if self.depth > 0 {
                        sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sum);
                    }
                    _mm512_mask_storeu_ps(to, lanes, sum);
                }
            }
        }
    }
}
