//! AMX: products of matrices of bf16, one tile of 16 rows of 64 bytes at a time, summed in f32.
//!
//! An f32 number is the sum of three bf16 numbers, so products with bf16 on one side are as exact as in f32.
//! The instructions treat denormals as zero, and a product of infinity with the parts of a number may be NaN.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __m512, _mm512_and_si512, _mm512_castps_si512};
use std::arch::x86_64::{
    _CMP_EQ_OQ, _mm512_abs_ps, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_maskz_sub_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_sub_ps,
};
use std::sync::OnceLock;

pub(crate) mod squares;

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const ROW: usize = 64;
/// Bytes of a tile.
pub(crate) const TILE_BYTES: usize = ROWS * ROW;
/// Products of tiles that one call sums, each into its own tile of results.
pub(crate) const PRODUCTS: usize = 4;
// Decision: docs/decisions/backend-cpu.md#amx-takes-a-number-of-f32-as-three-of-bf16
/// Numbers of bf16 whose sum is a number of f32.
pub(crate) const PARTS: usize = 3;

/// Returns whether the processor multiplies tiles of bf16 and the system lets this process use them.
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

/// Asks Linux for the tile state, which it saves only for processes that ask; returns whether it was granted.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: this call takes two integers, reads and writes no memory of the process, and changes only its
    // permissions.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The configuration of a thread's tiles: all of them at full size.
#[repr(C, align(64))]
struct TileConfig([u8; 64]);

static CONFIG: TileConfig = {
    let mut config = [0; 64];
    config[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        config[16 + 2 * tile] = ROW as u8;
        config[48 + tile] = ROWS as u8;
        tile += 1;
    }
    TileConfig(config)
};

/// The tiles of the current thread, configured while the value lives. The pointer keeps the value in its
/// thread.
pub(crate) struct AmxTiles(std::marker::PhantomData<*mut ()>);

impl AmxTiles {
    /// Configures the tiles of the current thread.
    ///
    /// # Safety
    /// [`is_available`] has returned true, no other `AmxTiles` of this thread lives, and the value is dropped
    /// in this thread.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: `CONFIG` is 64 valid bytes, AMX is available, and no other `AmxTiles` uses the tiles of
        // this thread.
        unsafe { asm!("ldtilecfg [{}]", in(reg) CONFIG.0.as_ptr(), options(nostack, readonly)) };
        Self(std::marker::PhantomData)
    }
}

impl Drop for AmxTiles {
    fn drop(&mut self) {
        // SAFETY: `new` configured the tiles of this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The operands of which each product has its own. Each gives one tile per step.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) at: [*const u8; PRODUCTS],
    /// Bytes from one row of a tile to the next.
    pub(crate) stride: usize,
    /// Bytes from one step to the next.
    pub(crate) step: usize,
}

/// The operand that all products share. Each step takes `parts` tiles, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct SharedOperand {
    pub(crate) at: *const u8,
    pub(crate) parts: usize,
}

/// Sums, over all steps, four products of tiles. `$load` loads the tiles of the shared operand; `$dot` names
/// the two factors of each product in their order.
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
            tiles = in(reg) $shared.parts * TILE_BYTES,
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

/// Computes `out[i][r][c] = Σ each[i][r] · shared[c]`: rows in place, times columns. Elements of a column are
/// stored in pairs, 16 columns to a row.
///
/// # Safety
/// AMX with bf16 is available and this thread holds the [`AmxTiles`] passed. `steps` is at least 1. Every
/// tile that `each` and `shared` describe for `steps` steps is readable, `out` is valid for writes of
/// [`PRODUCTS`] tiles, and `shared.parts` is 1 or [`PARTS`].
#[inline]
pub(crate) unsafe fn rows_by_columns(
    _: &AmxTiles,
    each: Operands,
    shared: SharedOperand,
    steps: usize,
    out: *mut f32,
) {
    debug_assert!(steps > 0 && [1, PARTS].contains(&shared.parts));
    // SAFETY: by contract, the tiles of `steps >= 1` steps are readable, `out` takes [`PRODUCTS`] tiles, and
    // tiles are configured; the assembly accesses nothing else.
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

/// Computes `out[i][r][c] = Σ shared[r] · each[i][c]`: rows in [`PARTS`] parts, times four sets of columns.
/// In [`rows_by_columns`] the shared operand has the columns.
///
/// # Safety
/// As for [`rows_by_columns`], with `shared.parts` equal to [`PARTS`].
#[inline]
pub(crate) unsafe fn row_by_each_columns(
    _: &AmxTiles,
    each: Operands,
    shared: SharedOperand,
    steps: usize,
    out: *mut f32,
) {
    debug_assert!(steps > 0 && shared.parts == PARTS);
    // SAFETY: by contract, the tiles of `steps >= 1` steps are readable, `out` takes [`PRODUCTS`] tiles, and
    // tiles are configured; the assembly accesses nothing else.
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

/// Returns the upper half of every element, with zeros below.
#[inline(always)]
unsafe fn cut(a: __m512) -> __m512 {
    // SAFETY: AVX-512 F is available by contract, and no pointer is involved.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), upper))
    }
}

/// Splits a vector of f32 into three of bf16, in the upper halves of their elements, whose sum is the vector.
/// Of an infinite element, the second and the third part are 0.
///
/// # Safety
/// The processor supports AVX-512 F and DQ, and the caller is compiled for them.
#[inline(always)]
pub(crate) unsafe fn parts(a: __m512) -> [__m512; PARTS] {
    // SAFETY: AVX-512 F and DQ are available by contract, and no pointer is involved.
    unsafe {
        let first = cut(a);
        let infinite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_abs_ps(a), _mm512_set1_ps(f32::INFINITY));
        let rest = _mm512_maskz_sub_ps(!infinite, a, first);
        let second = cut(rest);
        [first, second, _mm512_sub_ps(rest, second)]
    }
}
