//! A sequence length: a number of tokens, or the model's maximum.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

/// A sequence length: a number of tokens, or the model's maximum. In configurations it is a number or
/// `"max"`; 0 means `"max"`.
///
/// ```
/// use kvcore::MaxLen;
/// assert_eq!(MaxLen::from(1024).for_model(4096), 1024);
/// assert_eq!(MaxLen::from(0), MaxLen::Model);
/// assert_eq!(MaxLen::Model.for_model(4096), 4096);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "LengthText", into = "LengthText")]
pub enum MaxLen {
    /// The model's maximum sequence length.
    #[default]
    Model,
    /// This number of tokens, or the model's maximum sequence length if that is shorter.
    Tokens(NonZeroUsize),
}

impl MaxLen {
    /// Returns the length in tokens for a model that supports `max_positions` tokens.
    pub fn for_model(self, max_positions: usize) -> usize {
        match self {
            Self::Model => max_positions,
            Self::Tokens(tokens) => tokens.get().min(max_positions),
        }
    }
}

impl From<usize> for MaxLen {
    fn from(tokens: usize) -> Self {
        NonZeroUsize::new(tokens).map_or(Self::Model, Self::Tokens)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum LengthText {
    Tokens(usize),
    Max(Max),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Max {
    Max,
}

impl From<LengthText> for MaxLen {
    fn from(text: LengthText) -> Self {
        match text {
            LengthText::Tokens(tokens) => tokens.into(),
            LengthText::Max(Max::Max) => Self::Model,
        }
    }
}

impl From<MaxLen> for LengthText {
    fn from(len: MaxLen) -> Self {
        match len {
            MaxLen::Model => Self::Max(Max::Max),
            MaxLen::Tokens(tokens) => Self::Tokens(tokens.get()),
        }
    }
}
