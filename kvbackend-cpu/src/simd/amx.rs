//! Matrix products with AMX. A bf16 tile has 16 rows of 64 bytes, and products are summed in f32.
//!
//! Every f32 number is a sum of three bf16 numbers, so products in which one operand is bf16 are as exact as
//! in f32. The instructions treat denormals as zero, and infinity times the parts of a number may give NaN.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __m512, _mm512_and_si512, _mm512_castps_si512};
use std::arch::x86_64::{
    _CMP_EQ_OQ, _mm512_abs_ps, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_maskz_sub_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_sub_ps,
};
use std::sync::OnceLock;

pub(crate) mod squares;

/// Number of rows per tile.
pub(crate) const ROWS: usize = 16;
/// Number of bytes per row of a tile.
pub(crate) const ROW: usize = 64;
/// Number of bytes per tile.
pub(crate) const TILE_BYTES: usize = ROWS * ROW;
/// Number of tile products that one call computes, each in its own result tile.
pub(crate) const PRODUCTS: usize = 4;
// Decision: docs/decisions/backend-cpu.md#amx-takes-an-f32-number-as-three-bf16-numbers
/// Number of bf16 numbers needed to represent any f32 number as their sum.
pub(crate) const PARTS: usize = 3;

/// Returns whether the processor can multiply bf16 tiles and the system permits this process to use tiles.
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

/// Asks Linux for permission to use tiles, and returns whether Linux granted it. Linux saves tile state only
/// for processes with this permission.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const REQUEST: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: this call takes two integers, accesses no memory of the process, and changes only what the
    // process is permitted to do.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The tile configuration of a thread, in which all tiles have full size.
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

/// The current thread's tiles, which are configured while the value lives. The pointer makes the type
/// `!Send`.
pub(crate) struct AmxTiles(std::marker::PhantomData<*mut ()>);

impl AmxTiles {
    /// Configures the current thread's tiles.
    ///
    /// # Safety
    /// [`is_available`] must have returned true, no other `AmxTiles` of this thread may be alive, and the
    /// value must be dropped in this thread.
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

/// Operands that differ between the products. Each operand has one tile per step.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) at: [*const u8; PRODUCTS],
    /// Distance in bytes between consecutive rows of a tile.
    pub(crate) stride: usize,
    /// Distance in bytes between consecutive steps.
    pub(crate) step: usize,
}

/// The operand that all products share. Each step uses `parts` consecutive tiles.
#[derive(Clone, Copy)]
pub(crate) struct SharedOperand {
    pub(crate) at: *const u8,
    pub(crate) parts: usize,
}

/// Sums four tile products over all steps. `$load` loads the tiles of the shared operand, and `$dot`
/// determines the order of the two factors in each product.
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

/// Computes `out[i][r][c] = Σ each[i][r] · shared[c]`: multiplies four sets of rows, read in place, by shared
/// columns. The elements of a column are stored in pairs, and 16 columns share a row of a tile.
///
/// # Safety
/// AMX with bf16 must be available, and this thread must hold the [`AmxTiles`] passed. `steps` must be at
/// least 1, and `shared.parts` must be 1 or [`PARTS`]. Every tile that `each` and `shared` describe for
/// `steps` steps must be readable, and `out` must be valid for writes of [`PRODUCTS`] tiles.
#[inline]
pub(crate) unsafe fn rows_by_columns(
    _: &AmxTiles,
    each: Operands,
    shared: SharedOperand,
    steps: usize,
    out: *mut f32,
) {
    debug_assert!(steps > 0 && [1, PARTS].contains(&shared.parts));
    // SAFETY: by contract, the tiles of `steps >= 1` steps are readable, `out` has room for [`PRODUCTS`]
    // tiles, and tiles are configured; the assembly accesses nothing else.
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

/// Computes `out[i][r][c] = Σ shared[r] · each[i][c]`: multiplies shared rows in [`PARTS`] parts by four sets
/// of columns. In [`rows_by_columns`], the columns are the shared operand instead.
///
/// # Safety
/// The same as for [`rows_by_columns`], but `shared.parts` must be [`PARTS`].
#[inline]
pub(crate) unsafe fn row_by_each_columns(
    _: &AmxTiles,
    each: Operands,
    shared: SharedOperand,
    steps: usize,
    out: *mut f32,
) {
    debug_assert!(steps > 0 && shared.parts == PARTS);
    // SAFETY: by contract, the tiles of `steps >= 1` steps are readable, `out` has room for [`PRODUCTS`]
    // tiles, and tiles are configured; the assembly accesses nothing else.
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

/// Returns the upper half of every element, with zeros in the lower half.
#[inline(always)]
unsafe fn cut(a: __m512) -> __m512 {
    // SAFETY: AVX-512 F is available by contract, and no pointers are involved.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), upper))
    }
}

/// Splits an f32 vector into three bf16 vectors with the same sum. The bf16 numbers are in the upper halves
/// of the elements. The second and third parts of an infinite element are 0.
///
/// # Safety
/// The processor must support AVX-512 F and DQ, and the caller must be compiled for them.
#[inline(always)]
pub(crate) unsafe fn parts(a: __m512) -> [__m512; PARTS] {
    // SAFETY: AVX-512 F and DQ are available by contract, and no pointers are involved.
    unsafe {
        let first = cut(a);
        let infinite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_abs_ps(a), _mm512_set1_ps(f32::INFINITY));
        let rest = _mm512_maskz_sub_ps(!infinite, a, first);
        let second = cut(rest);
        [first, second, _mm512_sub_ps(rest, second)]
    }
}
