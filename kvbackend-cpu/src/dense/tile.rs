//! Tiles: the products of up to six rows with four or eight matrix rows, summed in registers.

use std::ops::Range;

use crate::simd::Simd;

/// Number of matrix rows to process at a time.
pub(super) const COLUMNS: usize = 8;

/// Matrix rows as f32 values. The rows begin `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    pub values: &'a [f32],
    pub count: usize,
    pub stride: usize,
}

impl Columns<'_> {
    /// Returns a range of the rows.
    pub(super) fn part(self, rows: Range<usize>) -> Self {
        Self { values: &self.values[rows.start * self.stride..], count: rows.len(), ..self }
    }
}

/// Computes `y[r * stride + c] = x[r] · w[c]` for all rows of `w`, which may have at most [`COLUMNS`] rows.
/// The rows of `w` and `x` must have `input` elements. If `ahead` is set, prefetches the matrix rows after
/// `w`, because they are used next.
///
/// # Safety
/// In each of `rows` rows, `y` must be valid for writes of as many elements as `w` has rows, and no other
/// code may access them. The caller must be compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn columns<S: Simd>(
    (x, rows, input): (&[f32], usize, usize),
    w: Columns<'_>,
    (y, stride): (*mut f32, usize),
    ahead: bool,
) {
    let whole = w.stride >= input && w.values.len() >= w.count * w.stride;
    assert!(x.len() == rows * input && whole, "whole rows");
    // Rows are processed in runs of equal length whose sums fit in registers. The depth is chosen so that the
    // matrix rows fill half of the first-level cache (32 KiB, or 48 KiB on processors with more registers).
    let (most, depth_of_all) = if S::REGISTERS >= 32 { (6, 1024) } else { (3, 512) };
    let runs = rows.div_ceil(most);
    // The parts have equal lengths, because a short part would spend more time on its final sums than on its
    // products.
    let depth_of_all = input.div_ceil(input.div_ceil(depth_of_all).max(1)).next_multiple_of(S::LANES);
    for from in (0..input).step_by(depth_of_all.max(1)) {
        let depth = depth_of_all.min(input - from);
        for run in 0..runs {
            let at = rows * run / runs;
            let taken = rows * (run + 1) / runs - at;
            // SAFETY: `at + taken <= rows`, `from + depth <= input`, and a tile reads `depth` elements of
            // `taken` rows of `x`, and of one row of `w` per column.
            unsafe {
                let tile = ProductTile {
                    x: x.as_ptr().add(at * input + from),
                    w: w.values.as_ptr().add(from),
                    input,
                    w_stride: w.stride,
                    depth,
                    y: y.add(at * stride),
                    stride,
                    add: from > 0,
                    ahead: ahead && run == 0,
                };
                tile.run::<S>(taken, w.count);
            }
        }
    }
}

/// The operands and the output of one tile.
///
/// `x` and `w` point to rows of `depth` elements, which are `input` and `w_stride` elements apart. `y` points
/// to the products, whose rows are `stride` elements apart.
#[derive(Clone, Copy)]
struct ProductTile {
    x: *const f32,
    w: *const f32,
    input: usize,
    w_stride: usize,
    depth: usize,
    y: *mut f32,
    stride: usize,
    /// True if the products are added to the contents of `y`.
    add: bool,
    /// True to prefetch the next rows of `w`.
    ahead: bool,
}

impl ProductTile {
    /// Computes `rows × columns` products. `rows` must be at most 6.
    ///
    /// # Safety
    /// `x` must have `rows` rows, `w` must have `columns` rows, and `y` must be valid for their products. The
    /// caller must be compiled for `S`.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, rows: usize, columns: usize) {
        // SAFETY: an `R × C` tile reads `R` rows of `x` and `C` rows of `w`: `R` is `rows`, and `C` is at
        // most `columns`.
        unsafe {
            let fours = columns / 4 * 4;
            for c in (0..fours).step_by(4) {
                let tile = self.at(c);
                match rows {
                    1 => tile.products::<S, 1, 4>(),
                    2 => tile.products::<S, 2, 4>(),
                    3 => tile.products::<S, 3, 4>(),
                    4 => tile.products::<S, 4, 4>(),
                    5 => tile.products::<S, 5, 4>(),
                    _ => tile.products::<S, 6, 4>(),
                }
            }
            for c in fours..columns {
                for r in 0..rows {
                    let tile = self.at(c);
                    let (x, y) = (tile.x.add(r * self.input), tile.y.add(r * self.stride));
                    Self { x, y, ..tile }.one::<S>();
                }
            }
        }
    }

    /// Returns the tile that begins at the given column of this tile.
    ///
    /// # Safety
    /// `w` and `y` must have the column.
    #[inline(always)]
    unsafe fn at(self, column: usize) -> Self {
        // SAFETY: by contract, both have this column.
        unsafe { Self { w: self.w.add(column * self.w_stride), y: self.y.add(column), ..self } }
    }

    /// Computes `R × C` products. `C` must be a multiple of 4.
    ///
    /// # Safety
    /// The same as for [`run`](Self::run), with `R` rows and `C` columns.
    #[inline(always)]
    unsafe fn products<S: Simd, const R: usize, const C: usize>(self) {
        let Self { x, w, input, w_stride, depth, y, stride, add, ahead } = self;
        // SAFETY: `i + LANES <= depth` where a vector is loaded, and `i < depth` where a single element is
        // loaded, in `R` rows of `x` and `C` rows of `w`; `y` is valid for `C` products in each of `R` rows
        // by contract.
        unsafe {
            let mut sums = [[S::splat(0.0); C]; R];
            let mut i = 0;
            while i + S::LANES <= depth {
                // The elements of `x` and the sums stay in registers; one more register holds the elements of
                // each column in turn.
                let mut of_x = [S::splat(0.0); R];
                for (r, of_x) in of_x.iter_mut().enumerate() {
                    *of_x = S::load(x.add(r * input + i));
                }
                for c in 0..C {
                    let of_w = S::load(w.add(c * w_stride + i));
                    if ahead {
                        S::prefetch(w.wrapping_add((COLUMNS + c) * w_stride + i).cast());
                    }
                    for (sums, of_x) in sums.iter_mut().zip(of_x) {
                        sums[c] = S::mul_add(of_x, of_w, sums[c]);
                    }
                }
                i += S::LANES;
            }
            for (r, sums) in sums.iter().enumerate() {
                for c in (0..C).step_by(4) {
                    let mut four = S::sum_four(sums[c], sums[c + 1], sums[c + 2], sums[c + 3]);
                    for (c, sum) in (c..).zip(&mut four) {
                        for i in i..depth {
                            *sum += *x.add(r * input + i) * *w.add(c * w_stride + i);
                        }
                    }
                    let to = y.add(r * stride + c).cast::<[f32; 4]>();
                    if add {
                        let before = to.read_unaligned();
                        four = std::array::from_fn(|j| before[j] + four[j]);
                    }
                    to.write_unaligned(four);
                }
            }
        }
    }

    /// Computes one product.
    ///
    /// # Safety
    /// The same as for [`run`](Self::run), with one row and one column.
    #[inline(always)]
    unsafe fn one<S: Simd>(self) {
        let Self { x, w, depth, y, add, .. } = self;
        // SAFETY: `i + LANES <= depth` where a vector is loaded, and `i < depth` where a single element is
        // loaded; `y` is valid for one product by contract.
        unsafe {
            let mut sum = S::splat(0.0);
            let mut i = 0;
            while i + S::LANES <= depth {
                sum = S::mul_add(S::load(x.add(i)), S::load(w.add(i)), sum);
                i += S::LANES;
            }
            let mut sum = S::sum(sum);
            for i in i..depth {
                sum += *x.add(i) * *w.add(i);
            }
            *y = if add { *y + sum } else { sum };
        }
    }
}
