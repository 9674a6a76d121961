//! The instruction sets that kernels can be compiled for.

use std::fmt;
use std::str::FromStr;

use kvcore::{Error, Result};

use super::Simd;
use super::portable::Portable;
use crate::NAME;

#[cfg(target_arch = "x86_64")]
use super::{amx, avx2::Avx2, avx512::Avx512};

/// An instruction set that fast kernels are compiled for.
///
/// ```
/// use kvbackend_cpu::SimdLevel;
/// let best = SimdLevel::best();
/// assert!(best.is_available() && SimdLevel::Portable <= best);
/// assert_eq!("avx2".parse(), Ok(SimdLevel::Avx2));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// The instruction set that the program was compiled for, which is by default SSE2 on x86-64 and NEON on
    /// 64-bit ARM.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL. Conversions to bf16 use integer arithmetic, because the dedicated
    /// instruction (`AVX512_BF16`) flushes denormals, which no other backend does.
    Avx512,
    /// AVX-512 and AMX with bf16. Attention over bf16 keys and values uses tile products, and so do products
    /// of many rows and a stored matrix. Operands are split into as many bf16 parts as they need.
    Amx,
}

/// Code that is generic over the instruction set.
pub(crate) trait SimdTask {
    /// The type of the task's result.
    type Output;

    /// Runs the task.
    ///
    /// # Safety
    /// The processor must support the instruction set of `S`, the caller must be compiled for it, and the
    /// fields of `self` must meet the conditions stated at the task's type.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

impl SimdLevel {
    /// All levels, from the simplest to the best.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// Returns the best level that this processor supports.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.is_available()).unwrap_or(Self::Portable)
    }

    /// Returns whether this processor supports the level.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_available() && amx::is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Amx => false,
        }
    }

    /// Returns this level if the processor supports it.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the processor does not support the level.
    pub fn checked(self) -> Result<Self> {
        if self.is_available() {
            Ok(self)
        } else {
            Err(Error::Unsupported { backend: NAME, what: format!("{self} on this processor") })
        }
    }
}

/// A level that the processor supports. Code that is not itself a task needs an `AvailableLevel` to run a
/// task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvailableLevel(SimdLevel);

impl AvailableLevel {
    pub(crate) fn new(level: SimdLevel) -> Result<Self> {
        level.checked().map(Self)
    }

    pub(crate) fn best() -> Self {
        Self(SimdLevel::best())
    }

    pub(crate) fn level(self) -> SimdLevel {
        self.0
    }

    /// Runs a task in a function that is compiled for this level.
    ///
    /// # Safety
    /// The fields of `task` must meet the conditions stated at the task's type.
    pub(crate) unsafe fn run<T: SimdTask>(self, task: T) -> T::Output {
        match self.0 {
            // SAFETY: every processor that the program runs on supports the instructions it is compiled for,
            // and the conditions of `task` hold by contract.
            SimdLevel::Portable => unsafe { Portable::call(task) },
            // SAFETY: `new` or `best` found AVX2, FMA and F16C, and the conditions of `task` hold by
            // contract.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => unsafe { with_avx2(task) },
            // SAFETY: `new` or `best` found AVX-512 F, BW, DQ and VL, and the conditions of `task` hold by
            // contract.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 | SimdLevel::Amx => unsafe { with_avx512(task) },
            // SAFETY: as for `Portable`, which needs no extra instructions. On this architecture, `new` and
            // `best` never return these levels.
            #[cfg(not(target_arch = "x86_64"))]
            SimdLevel::Avx2 | SimdLevel::Avx512 | SimdLevel::Amx => unsafe { Portable::call(task) },
        }
    }
}

/// Runs a task in a function compiled for AVX2.
///
/// # Safety
/// The processor must support AVX2, FMA and F16C, and the fields of `task` must meet the conditions stated at
/// its type.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
pub(super) unsafe fn with_avx2<T: SimdTask>(task: T) -> T::Output {
    // SAFETY: AVX2, FMA, F16C and the conditions of `task` hold by contract, and this function is compiled
    // for the instructions.
    unsafe { task.run::<Avx2>() }
}

/// Runs a task in a function compiled for AVX-512.
///
/// # Safety
/// The processor must support AVX2, FMA, F16C and AVX-512 F, BW, DQ and VL, and the fields of `task` must
/// meet the conditions stated at its type.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline(never)]
pub(super) unsafe fn with_avx512<T: SimdTask>(task: T) -> T::Output {
    // SAFETY: AVX-512 and the conditions of `task` hold by contract, and this function is compiled for the
    // instructions.
    unsafe { task.run::<Avx512>() }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        })
    }
}

impl FromStr for SimdLevel {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|level| level.to_string() == s).ok_or_else(|| Error::Unsupported {
            backend: NAME,
            what: format!("SIMD level {s:?}; use portable, avx2, avx512 or amx"),
        })
    }
}
