//! Rotary position embeddings: `RoPE(x, m)` rotates pairs of elements by `m * frequency`.
//!
//! Rotations compose, so `(R(m) q)·(R(P + i) k) = (R(m − P) q)·(R(i) k)`: a key stored with the rotation for
//! `i` can be used at `P + i` if the *query* is rotated by `m − P`. Position-independent reuse relies on this
//! identity.
//!
//! Frequencies are computed in f32 as in Hugging Face transformers, so they match the model's. Angles, sines
//! and cosines are computed in f64 and rounded once. For frequencies that depend on the length of a request,
//! see [`Regime`].

mod config;
mod family;
mod form;
mod frequencies;
mod regime;
mod table;

pub use config::{Pairing, RopeConfig, RopeScaling};
pub use family::{LayerRopes, RopeFamily};
pub use form::KeyForm;
pub use regime::Regime;
pub use table::{Rope, RopeTable};

/// Rotates the leading `2 * cos.len()` elements of `row` and multiplies them by `factor`.
///
/// `cos` and `sin` hold one value per pair. Elements past the rotary dimension are not changed. To move a
/// row from one position to another, pass the cosine and sine of the difference and a factor of 1: the
/// attention factor of `YaRN` or `LongRoPE` was applied when the key was first rotated.
///
/// ```
/// use kvcore::{rotate_row, Pairing};
/// let mut row = [1.0, 0.0, 0.0, 0.0, 7.0];
/// rotate_row(&mut row, &[0.0, 1.0], &[1.0, 0.0], 1.0, Pairing::HalfSplit);
/// assert_eq!(row, [0.0, 0.0, 1.0, 0.0, 7.0]); // (1, 0) turned by 90°; the fifth element untouched
/// ```
pub fn rotate_row(row: &mut [f32], cos: &[f32], sin: &[f32], factor: f32, pairing: Pairing) {
    let half = cos.len();
    for i in 0..half {
        let (x, y) = match pairing {
            Pairing::HalfSplit => (i, i + half),
            Pairing::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (row[x], row[y]);
        row[x] = (a * cos[i] - b * sin[i]) * factor;
        row[y] = (a * sin[i] + b * cos[i]) * factor;
    }
}
