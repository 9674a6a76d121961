//! Evidence: the information about the tokens of reused chunks that a strategy needs to select tokens.

use serde::{Deserialize, Serialize};

/// The rows that deviations compare: keys, values or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviationOf {
    /// The keys, in the form and at the position in which they are stored.
    Keys,
    /// The values, as in CacheBlend's code.
    #[default]
    Values,
    /// Keys and values: the sum of the two deviations, each relative to the mean squared norm of its rows.
    Both,
}

/// The layer at which a strategy compares stored rows with fresh rows, and the rows that it compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviationCheck {
    /// The zero-based layer. At layer 0, rows deviate only because of the system prompt and the position.
    pub layer: usize,
    /// The rows to compare.
    pub of: DeviationOf,
}

/// The layers whose attention counts when the question's attention to each token is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionCheck {
    /// The first layer that counts (zero-based). All later layers count too. `None` leaves out the first
    /// third of the model's layers.
    pub from: Option<usize>,
}

impl AttentionCheck {
    /// Returns the first layer that counts in a model with `layers` layers.
    pub fn first_layer(self, layers: usize) -> usize {
        self.from.unwrap_or(layers / 3)
    }
}

/// The information about each token of reused chunks that a strategy needs to select tokens. Both fields are
/// `None` if the strategy needs no information.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evidence {
    /// The question's attention to each token, computed over the reused keys. To measure it, the model
    /// computes the question one additional time.
    pub attention: Option<AttentionCheck>,
    /// The distance between each token's stored KV and its KV under full attention. To measure it, the model
    /// computes all tokens up to the layer of the check.
    pub deviations: Option<DeviationCheck>,
}

impl Evidence {
    /// Returns whether no evidence is needed.
    pub fn is_none(&self) -> bool {
        self.attention.is_none() && self.deviations.is_none()
    }

    /// Returns the highest zero-based layer at which a requested check starts in a model with `layers`
    /// layers, or `None` if no check is requested.
    pub fn deepest_start(&self, layers: usize) -> Option<usize> {
        let attention = self.attention.map(|check| check.first_layer(layers));
        attention.max(self.deviations.map(|check| check.layer))
    }
}

/// One score for every chunk token.
///
/// A deviation is `‖fresh − stored‖² / mean ‖fresh‖²`. Attention is the weight of the token after the
/// softmax, summed over the question's tokens, the heads and the layers that count.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenScores(Vec<Vec<f32>>);

impl TokenScores {
    /// Creates scores from one list per chunk, with one score per token.
    pub fn new(chunks: Vec<Vec<f32>>) -> Self {
        Self(chunks)
    }

    /// Returns one list per chunk, with one score per token.
    pub fn chunks(&self) -> &[Vec<f32>] {
        &self.0
    }

    /// Returns the score of a token in a chunk, or 0 if the token has no score.
    pub fn of(&self, chunk: usize, token: usize) -> f32 {
        self.0.get(chunk).and_then(|chunk| chunk.get(token)).copied().unwrap_or(0.0)
    }
}

/// The results for the [`Evidence`] that a strategy requested.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Findings {
    /// The attention to each token, if requested.
    pub attention: Option<TokenScores>,
    /// The deviation of each token, if requested.
    pub deviations: Option<TokenScores>,
}
