//! How far the stored KV of tokens is from what full attention gives, at one layer.

use serde::{Deserialize, Serialize};

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviationOf {
    /// Keys, both rotated to the position where they are stored.
    Keys,
    /// Values, as CacheBlend's code does.
    #[default]
    Values,
    /// The sum of both, each relative to the size of what is compared.
    Both,
}

/// Where a strategy looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviationCheck {
    /// The layer, counted from 0. At layer 0 nothing deviates yet but by system prompt and position.
    pub layer: usize,
    /// What is compared.
    pub of: DeviationOf,
}

/// Deviations of every chunk token: `‖fresh − stored‖² / mean ‖fresh‖²` at the layer that was asked for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Deviations(Vec<Vec<f32>>);

impl Deviations {
    /// For each chunk, one number per token.
    pub fn new(chunks: Vec<Vec<f32>>) -> Self {
        Self(chunks)
    }

    /// For each chunk, one number per token.
    pub fn chunks(&self) -> &[Vec<f32>] {
        &self.0
    }
}
