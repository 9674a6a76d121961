//! Two tiles of rows times two tiles of columns, both sides in parts of bf16: products of numbers of f32.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_set1_epi32, _mm512_setzero_si512, _mm512_sub_ps,
};

use super::{AmxTiles, PARTS, ROW};
use crate::simd::avx512::upper_halves;

/// Tiles of results of one call: row tile 0 with both column tiles, then row tile 1.
pub(crate) const SQUARES: usize = 4;

/// Adds the four products of the tiles that are loaded.
macro_rules! dots {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6\ntdpbf16ps tmm1, tmm4, tmm7\ntdpbf16ps tmm2, tmm5, tmm6\ntdpbf16ps tmm3, tmm5, tmm7"
    };
}

/// Loads two tiles of rows, of the part that begins at this byte of a step.
macro_rules! rows {
    ($at:literal) => {
        concat!("tileloadd tmm4, [{r0} + {row} + ", $at, "]\ntileloadd tmm5, [{r1} + {row} + ", $at, "]")
    };
}

/// Loads two tiles of columns, as `rows` does, and adds the four products of the tiles that are loaded.
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

/// Sums, over all steps, the products of two tiles of rows, `tmm4` and `tmm5`, with two tiles of columns,
/// `tmm6` and `tmm7`.
///
/// `$small` are the products of a step whose factors are not both first parts. They are summed over all steps
/// before the products of first parts are added, from the last step to the first. A large sum is therefore
/// rounded only once per step.
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

/// Tiles of rows in parts, and tiles of columns in [`PARTS`] parts. The parts of a step are contiguous, and
/// so are the steps.
#[derive(Clone, Copy)]
pub(crate) struct Square {
    pub(crate) rows: [*const u8; 2],
    pub(crate) columns: [*const u8; 2],
    /// Parts of an element of the rows: 1, 2 or 3.
    pub(crate) parts: usize,
}

/// Computes `out[2 i + j][r][c] = Σ rows[i][r] · columns[j][c]` as exactly as sums in f32 do. Elements of a
/// column are stored in pairs, 16 columns to a row. Products of parts below the last digit of an f32 are left
/// out.
///
/// # Safety
/// AMX with bf16 is available and this thread holds the [`AmxTiles`] passed. `steps` is at least 1, and
/// `of.parts` is 1, 2 or
/// 3. Every tile that `of` describes for `steps` steps is readable, and `out` is valid for writes of
///    [`SQUARES`] tiles.
#[inline]
pub(crate) unsafe fn two_by_two(_: &AmxTiles, of: Square, steps: usize, out: *mut f32) {
    debug_assert!(steps > 0 && (1..=PARTS).contains(&of.parts));
    // SAFETY: by contract, the tiles of `steps >= 1` steps are readable, `out` takes `SQUARES` tiles, and
    // tiles are configured; the assembly accesses nothing else.
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

/// Returns the number of bf16 that is nearest, in the upper half of every element; of two, the one with the
/// larger magnitude. Lower halves are zero.
#[inline(always)]
unsafe fn nearest(a: __m512) -> __m512 {
    // SAFETY: AVX-512 F is available by contract, and no pointer is involved.
    unsafe {
        let raised = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000));
        _mm512_castsi512_ps(_mm512_and_si512(raised, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
    }
}

/// Splits the elements of two vectors, those of `b` after those of `a`, into `N` bf16 numbers each. Each part
/// is at most 2⁻⁸ of the previous one. Three parts sum up to the element, and two do if the element has at
/// most 17 binary digits.
///
/// An element that is not finite, or that is rounded to infinity, has a part that is not finite.
///
/// # Safety
/// The processor supports AVX-512 F and BW, and the caller is compiled for them.
#[inline(always)]
pub(crate) unsafe fn split<const N: usize>(a: __m512, b: __m512) -> [__m512i; N] {
    // SAFETY: AVX-512 F and BW are available by contract, and no pointer is involved.
    unsafe {
        let (mut a, mut b) = (a, b);
        let mut halves = [_mm512_setzero_si512(); N];
        for (part, half) in halves.iter_mut().enumerate() {
            // The last part is what is left.
            let (first, second) = if part + 1 == N { (a, b) } else { (nearest(a), nearest(b)) };
            *half = upper_halves(_mm512_castps_si512(first), _mm512_castps_si512(second));
            (a, b) = (_mm512_sub_ps(a, first), _mm512_sub_ps(b, second));
        }
        halves
    }
}
