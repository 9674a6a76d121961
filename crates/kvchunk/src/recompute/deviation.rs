//! Deviations: the distance of the stored KV of tokens from that of full attention, at one layer.

use serde::{Deserialize, Serialize};

/// The rows that deviations compare: keys, values or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviationOf {
    /// The keys, both in the form and for the position in which they are stored.
    Keys,
    /// The values, as in CacheBlend's code.
    #[default]
    Values,
    /// The sum of the two deviations, each relative to the mean size of its rows.
    Both,
}

/// The layer at which a strategy compares stored with fresh rows, and the rows that it compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviationCheck {
    /// The layer, from 0. At layer 0 rows deviate only by system prompt and position.
    pub layer: usize,
    /// The rows to compare.
    pub of: DeviationOf,
}

/// The deviation of every chunk token at the checked layer: `‖fresh − stored‖² / mean ‖fresh‖²`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Deviations(Vec<Vec<f32>>);

impl Deviations {
    /// Creates deviations from one list per chunk, with one number per token.
    pub fn new(chunks: Vec<Vec<f32>>) -> Self {
        Self(chunks)
    }

    /// Returns one list per chunk, with one number per token.
    pub fn chunks(&self) -> &[Vec<f32>] {
        &self.0
    }
}
