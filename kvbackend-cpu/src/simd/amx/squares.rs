//! Products of f32 matrices: two row tiles times two column tiles, both split into bf16 parts.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_set1_epi32, _mm512_setzero_si512, _mm512_sub_ps,
};

use super::{AmxTiles, PARTS, ROW};
use crate::simd::avx512::upper_halves;

/// Number of result tiles per call. The two results of row tile 0 precede the two of row tile 1.
pub(crate) const SQUARES: usize = 4;

/// Adds the four products of the loaded tiles to the sums.
macro_rules! dots {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6\ntdpbf16ps tmm1, tmm4, tmm7\ntdpbf16ps tmm2, tmm5, tmm6\ntdpbf16ps tmm3, tmm5, tmm7"
    };
}

/// Loads two row tiles of the part that begins at the given byte of a step.
macro_rules! rows {
    ($at:literal) => {
        concat!("tileloadd tmm4, [{r0} + {row} + ", $at, "]\ntileloadd tmm5, [{r1} + {row} + ", $at, "]")
    };
}

/// Loads two column tiles, like `rows`, and adds the four products of the loaded tiles to the sums.
macro_rules! columns {
    ($at:literal) => {
        concat!(
            "tileloadd tmm6, [{c0} + {row} + ",
            $at,
            "]\ntileloadd tmm7, [{c1} + {row} + ",
            $at,
            "]\n",
            dots!()
        )
    };
}

/// Sums, over all steps, the products of two row tiles, `tmm4` and `tmm5`, with two column tiles, `tmm6` and
/// `tmm7`.
///
/// `$small` computes the products of a step in which at most one factor is a first part. These products are
/// summed over all steps, and then the products of first parts are added, from the last step to the first.
/// Large sums are therefore rounded only once per step.
macro_rules! squares {
    ($of:ident, $steps:ident, $out:ident, $row_step:literal, $($small:expr),*) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "mov {left}, {steps}",
            "2:",
            rows!("0"),
            $($small,)*
            concat!("add {r0}, ", $row_step),
            concat!("add {r1}, ", $row_step),
            "add {c0}, 3072",
            "add {c1}, 3072",
            "dec {left}",
            "jnz 2b",
            "3:",
            concat!("sub {r0}, ", $row_step),
            concat!("sub {r1}, ", $row_step),
            "sub {c0}, 3072",
            "sub {c1}, 3072",
            rows!("0"),
            columns!("0"),
            "dec {steps}",
            "jnz 3b",
            "tilestored [{out} + {row}], tmm0",
            "tilestored [{out} + {row} + 1024], tmm1",
            "tilestored [{out} + {row} + 2048], tmm2",
            "tilestored [{out} + {row} + 3072], tmm3",
            r0 = inout(reg) $of.rows[0] => _,
            r1 = inout(reg) $of.rows[1] => _,
            c0 = inout(reg) $of.columns[0] => _,
            c1 = inout(reg) $of.columns[1] => _,
            left = out(reg) _,
            steps = inout(reg) $steps => _,
            row = in(reg) ROW,
            out = in(reg) $out,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Two row tiles in `parts` parts, and two column tiles in [`PARTS`] parts. The parts of a step are
/// contiguous, and so are the steps.
#[derive(Clone, Copy)]
pub(crate) struct Square {
    pub(crate) rows: [*const u8; 2],
    pub(crate) columns: [*const u8; 2],
    /// Number of parts per row element: 1, 2 or 3.
    pub(crate) parts: usize,
}

/// Computes `out[2 i + j][r][c] = Σ rows[i][r] · columns[j][c]` with the accuracy of f32 sums. The elements
/// of a column are stored in pairs, and 16 columns share a row of a tile. Products of parts that are smaller
/// than the last digit of an f32 are omitted.
///
/// # Safety
/// AMX with bf16 must be available, and this thread must hold the [`AmxTiles`] passed. `steps` must be at
/// least 1, and `of.parts` must be in `1..=3`. Every tile that `of` describes for `steps` steps must be
/// readable, and `out` must be valid for writes of [`SQUARES`] tiles.
#[inline]
pub(crate) unsafe fn two_by_two(_: &AmxTiles, of: Square, steps: usize, out: *mut f32) {
    debug_assert!(steps > 0 && (1..=PARTS).contains(&of.parts));
    // SAFETY: by contract, the tiles of `steps >= 1` steps are readable, `out` has room for `SQUARES` tiles,
    // and tiles are configured; the assembly accesses nothing else.
    unsafe {
        match of.parts {
            1 => squares!(of, steps, out, "1024", columns!("2048"), columns!("1024")),
            2 => squares!(
                of,
                steps,
                out,
                "2048",
                columns!("2048"),
                columns!("1024"),
                rows!("1024"),
                dots!(),
                columns!("0")
            ),
            _ => squares!(
                of,
                steps,
                out,
                "3072",
                columns!("2048"),
                columns!("1024"),
                rows!("1024"),
                dots!(),
                columns!("0"),
                rows!("2048"),
                dots!()
            ),
        }
    }
}

/// Rounds every element to the nearest bf16 number, which is returned in the upper half of the element. Ties
/// are rounded away from zero. Lower halves are zero.
#[inline(always)]
unsafe fn nearest(a: __m512) -> __m512 {
    // SAFETY: AVX-512 F is available by contract, and no pointers are involved.
    unsafe {
        let raised = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000));
        _mm512_castsi512_ps(_mm512_and_si512(raised, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
    }
}

/// Splits the elements of two vectors into `N` bf16 parts each. In each part, the elements of `b` follow the
/// elements of `a`. A part is at most 2⁻⁸ of the previous part. Three parts always add up to the element, and
/// two parts do so if the element has at most 17 significant bits.
///
/// If an element is not finite, or is rounded to infinity, one of its parts is not finite.
///
/// # Safety
/// The processor must support AVX-512 F and BW, and the caller must be compiled for them.
#[inline(always)]
pub(crate) unsafe fn split<const N: usize>(a: __m512, b: __m512) -> [__m512i; N] {
    // SAFETY: AVX-512 F and BW are available by contract, and no pointers are involved.
    unsafe {
        let (mut a, mut b) = (a, b);
        let mut halves = [_mm512_setzero_si512(); N];
        for (part, half) in halves.iter_mut().enumerate() {
            // The last part is the remainder of the element.
            let (first, second) = if part + 1 == N { (a, b) } else { (nearest(a), nearest(b)) };
            *half = upper_halves(_mm512_castps_si512(first), _mm512_castps_si512(second));
            (a, b) = (_mm512_sub_ps(a, first), _mm512_sub_ps(b, second));
        }
        halves
    }
}
