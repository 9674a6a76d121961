//! The element types of kernels, f32, f16 and bf16, which are converted to f32 for arithmetic.

use bytemuck::Pod;
use half::{bf16, f16};
use kvcore::{DType, Error, Result};

use crate::NAME;

/// An element type that kernels convert to f32 and back, rounding to nearest, ties to even.
pub(crate) trait Element: Pod + Send + Sync {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for f16 {
    #[inline]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for bf16 {
    #[inline]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// Runs `$body` with `$t` as the element type named by `$dtype`.
macro_rules! dispatch {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            kvcore::DType::F32 => {
                type $t = f32;
                $body
            }
            kvcore::DType::F16 => {
                type $t = half::f16;
                $body
            }
            kvcore::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            other => Err(crate::element::unsupported(other)),
        }
    };
}
pub(crate) use dispatch;

pub(crate) fn unsupported(dtype: DType) -> Error {
    Error::Unsupported { backend: NAME, what: format!("element type {dtype}") }
}

/// Returns `bytes` as elements, ignoring an incomplete element at the end.
pub(crate) fn elements<T: Element>(bytes: &[u8]) -> Result<&[T]> {
    let whole = bytes.len() / size_of::<T>() * size_of::<T>();
    bytemuck::try_cast_slice(&bytes[..whole]).map_err(|_| misaligned::<T>(bytes))
}

/// Returns `bytes` as mutable elements, ignoring an incomplete element at the end.
pub(crate) fn elements_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T]> {
    let whole = bytes.len() / size_of::<T>() * size_of::<T>();
    let error = misaligned::<T>(bytes);
    bytemuck::try_cast_slice_mut(&mut bytes[..whole]).map_err(|_| error)
}

fn misaligned<T>(bytes: &[u8]) -> Error {
    Error::Misaligned { what: "a storage", address: bytes.as_ptr() as u64, align: align_of::<T>() }
}
