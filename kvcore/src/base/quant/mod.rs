//! Quantisation arithmetic, which stores the elements of a row in fewer bits. This module does not depend on
//! a device.
//!
//! | format | one code | scales | NaN and infinity |
//! |---|---|---|---|
//! | int8 | −127..=127 | f16 per token, head and group | the group reads back as NaN |
//! | int4 | −7..=7 | f16 per token, head and group | the group reads back as NaN |
//! | fp8 e4m3 | OCP E4M3, largest 448 | f32 per layer (and head), set once | NaN kept; infinity becomes NaN |
//! | fp8 e5m2 | OCP E5M2, largest 57344 | f32 per layer (and head), set once | both kept |
//!
//! An element is its code times its scale. The functions of this module define the results: a backend's
//! kernels may differ only in how they round ties.

mod format;
mod fp8;
mod int;

pub use format::{KvFormat, ScaleScope};
pub use fp8::Fp8Kind;
pub use int::IntKind;
