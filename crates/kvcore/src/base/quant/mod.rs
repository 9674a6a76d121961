//! Quantised caches: how the elements of a row are stored in fewer bits. Pure arithmetic, no device.
//!
//! | format | one code | scales | NaN and infinity |
//! |---|---|---|---|
//! | int8 | −127..=127 | f16 per token, head and group | the group reads back as NaN |
//! | int4 | −7..=7 | the same | the same |
//! | fp8 e4m3 | OCP E4M3, largest 448 | f32 per layer (and head), set once | NaN; infinity becomes NaN |
//! | fp8 e5m2 | OCP E5M2, largest 57344 | the same | kept |
//!
//! An element is its code times its scale. The functions here are the definition: a backend's kernels
//! may differ from them by the rounding of a tie, not by more.

mod format;
mod fp8;
mod int;

pub use format::{KvFormat, ScaleScope};
pub use fp8::Fp8Kind;
pub use int::IntKind;
