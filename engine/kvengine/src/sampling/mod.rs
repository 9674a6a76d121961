//! Chooses tokens from logits.

mod logprobs;
mod sample;

pub(crate) use logprobs::{likeliest, token_logprobs};
pub use sample::Sampler;
