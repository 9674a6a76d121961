//! AMX: products of matrices of bf16, a tile of 16 rows of 64 bytes at a time, summed in f32.
//!
//! A number of f32 is the sum of three of bf16, so products with one on one side are as exact as in f32. The
//! instructions take denormals for zero, and a product of infinity with the parts of a number may be no number.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __m512, _mm512_and_si512, _mm512_castps_si512};
use std::arch::x86_64::{
    _CMP_EQ_OQ, _mm512_abs_ps, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_maskz_sub_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_sub_ps,
};
use std::sync::OnceLock;

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const ROW: usize = 64;
/// Bytes of a tile.
pub(crate) const TILE: usize = ROWS * ROW;
/// Products at once: tiles of results.
pub(crate) const EACH: usize = 4;
/// Numbers of bf16 whose sum is a number of f32.
pub(crate) const PARTS: usize = 3;

/// Whether the processor multiplies tiles of bf16 and the system lets this process use them.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        __cpuid_count(0, 0).eax >= 7
            && __cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES
            && permitted()
    })
}

/// Asks Linux for the state of tiles, which it keeps for those alone who ask.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call has two numbers as arguments and changes nothing but this process's permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The form of a thread's tiles, all of them whole.
#[repr(C, align(64))]
struct Form([u8; 64]);

static FORM: Form = {
    let mut form = [0; 64];
    form[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        form[16 + 2 * tile] = ROW as u8;
        form[48 + tile] = ROWS as u8;
        tile += 1;
    }
    Form(form)
};

/// A thread's tiles, in use while this lives.
pub(crate) struct Tiles(());

impl Tiles {
    /// # Safety
    /// [`is_available`] has said so.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: the form is valid, and tiles belong to nobody else in this thread.
        unsafe { asm!("ldtilecfg [{}]", in(reg) FORM.0.as_ptr(), options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: there are tiles.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Four operands, a tile of each at every step.
#[derive(Clone, Copy)]
pub(crate) struct Each {
    pub(crate) at: [*const u8; EACH],
    /// Bytes from row to row.
    pub(crate) stride: usize,
    /// Bytes from step to step.
    pub(crate) step: usize,
}

/// The operand that all four share: at every step as many tiles as it has parts, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Shared {
    pub(crate) at: *const u8,
    pub(crate) parts: usize,
}

/// Sums over all steps of four products of tiles. `$left` and `$right` put an operand of the four and one that they
/// share in order; `$shared` are the registers of the latter.
macro_rules! products {
    ($each:ident, $shared:ident, $steps:ident, $out:ident, ($($load:literal),*), ($($dot:literal),*)) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            $($load,)*
            "tileloadd tmm7, [{a} + {stride}]",
            $(concat!("tdpbf16ps tmm0, ", $dot),)*
            "tileloadd tmm7, [{b} + {stride}]",
            $(concat!("tdpbf16ps tmm1, ", $dot),)*
            "tileloadd tmm7, [{c} + {stride}]",
            $(concat!("tdpbf16ps tmm2, ", $dot),)*
            "tileloadd tmm7, [{d} + {stride}]",
            $(concat!("tdpbf16ps tmm3, ", $dot),)*
            "add {shared}, {tiles}",
            "add {a}, {step}",
            "add {b}, {step}",
            "add {c}, {step}",
            "add {d}, {step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{out} + {row}], tmm0",
            "tilestored [{out} + {row} + 1024], tmm1",
            "tilestored [{out} + {row} + 2048], tmm2",
            "tilestored [{out} + {row} + 3072], tmm3",
            shared = inout(reg) $shared.at => _,
            tiles = in(reg) $shared.parts * TILE,
            row = in(reg) ROW,
            a = inout(reg) $each.at[0] => _,
            b = inout(reg) $each.at[1] => _,
            c = inout(reg) $each.at[2] => _,
            d = inout(reg) $each.at[3] => _,
            stride = in(reg) $each.stride,
            step = in(reg) $each.step,
            steps = inout(reg) $steps => _,
            out = in(reg) $out,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// `out[i][r][c] = Σ each[i][r] · shared[c]`: rows as they lie, times columns whose pairs of elements lie beside each
/// other, 16 columns to a row.
///
/// # Safety
/// The tiles of all steps can be read, four tiles written at `out`, and the thread has [`Tiles`]. There is a step.
#[inline]
pub(crate) unsafe fn rows_by_columns(_: &Tiles, each: Each, shared: Shared, steps: usize, out: *mut f32) {
    debug_assert!(steps > 0 && [1, PARTS].contains(&shared.parts));
    // SAFETY: the caller's.
    unsafe {
        if shared.parts == 1 {
            products!(each, shared, steps, out, ("tileloadd tmm4, [{shared} + {row}]"), ("tmm7, tmm4"));
        } else {
            products!(
                each,
                shared,
                steps,
                out,
                (
                    "tileloadd tmm4, [{shared} + {row}]",
                    "tileloadd tmm5, [{shared} + {row} + 1024]",
                    "tileloadd tmm6, [{shared} + {row} + 2048]"
                ),
                ("tmm7, tmm4", "tmm7, tmm5", "tmm7, tmm6")
            );
        }
    }
}

/// `out[i][r][c] = Σ shared[r] · each[i][c]`: the same of four sets of columns, with rows in [`PARTS`] parts.
///
/// # Safety
/// As [`rows_by_columns`].
#[inline]
pub(crate) unsafe fn row_by_each_columns(_: &Tiles, each: Each, shared: Shared, steps: usize, out: *mut f32) {
    debug_assert!(steps > 0 && shared.parts == PARTS);
    // SAFETY: the caller's.
    unsafe {
        products!(
            each,
            shared,
            steps,
            out,
            (
                "tileloadd tmm4, [{shared} + {row}]",
                "tileloadd tmm5, [{shared} + {row} + 1024]",
                "tileloadd tmm6, [{shared} + {row} + 2048]"
            ),
            ("tmm4, tmm7", "tmm5, tmm7", "tmm6, tmm7")
        );
    }
}

/// The upper half of every element.
#[inline(always)]
unsafe fn cut(a: __m512) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), upper))
    }
}

/// A vector of f32 as three of bf16, in the upper halves of their elements: their sum is the vector. Of what is not
/// finite only the first counts.
///
/// # Safety
/// The processor has AVX-512 F and DQ, and the caller is compiled for them.
#[inline(always)]
pub(crate) unsafe fn parts(a: __m512) -> [__m512; PARTS] {
    // SAFETY: the caller's.
    unsafe {
        let first = cut(a);
        let infinite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_abs_ps(a), _mm512_set1_ps(f32::INFINITY));
        let rest = _mm512_maskz_sub_ps(!infinite, a, first);
        let second = cut(rest);
        [first, second, _mm512_sub_ps(rest, second)]
    }
}
