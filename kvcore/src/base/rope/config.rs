//! The specification of a model's rotary embedding.

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result};

/// The rule that determines which two elements are rotated as a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pairing {
    /// Pairs element `i` with element `i + rotary_dim / 2` (Llama, Qwen and Mistral in the Hugging Face
    /// layout).
    HalfSplit,
    /// Pairs element `2 i` with element `2 i + 1` (GPT-J, and DeepSeek's stored layout).
    Interleaved,
}

/// The scaling of frequencies for contexts longer than the trained one.
///
/// Most scalings use the same frequencies for every request, so any request can reuse keys rotated with them.
/// [`DynamicNtk`](Self::DynamicNtk) and [`LongRope`](Self::LongRope) use different frequencies in each
/// [`Regime`](crate::base::Regime).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RopeScaling {
    /// No scaling: the trained frequencies.
    None,
    /// Position interpolation (Chen et al., 2023): all frequencies are divided by `factor`.
    Linear {
        /// Ratio of the extended context length to the trained one.
        factor: f64,
    },
    /// NTK-aware scaling (bloc97, 2023): theta is multiplied once by `factor^(d / (d − 2))`, where `d` is
    /// the rotary dimension. The lowest frequency is divided by `factor`, and the highest is kept.
    StaticNtk {
        /// Ratio of the extended context length to the trained one.
        factor: f64,
    },
    /// Dynamic NTK (emozilla, 2023): the trained frequencies are used up to the original context. For a
    /// longer request, of `n` positions, theta is multiplied by
    /// `(factor * n / original − (factor − 1))^(d / (d − 2))`.
    DynamicNtk {
        /// Ratio of the maximum context length to the trained one.
        factor: f64,
        /// Context length that the model was originally trained with, in positions.
        original_max_position: usize,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, and high frequencies are kept, with a smooth ramp
    /// in between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths longer than `original / low_freq_factor` are fully scaled.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original / high_freq_factor` are not scaled.
        high_freq_factor: f64,
        /// Context length that the model was originally trained with, in positions.
        original_max_position: usize,
    },
    /// YaRN (Peng et al., 2023): interpolation by parts, and an attention factor that multiplies cos and sin.
    Yarn {
        /// Ratio of the extended context length to the trained one.
        factor: f64,
        /// Factor by which cos and sin are multiplied when a query or a key is rotated.
        attention_factor: f64,
        /// A frequency is kept if it makes more than this many rotations over the original context.
        beta_fast: f64,
        /// A frequency is fully interpolated if it makes fewer than this many rotations over the original
        /// context.
        beta_slow: f64,
        /// Context length that the model was originally trained with, in positions.
        original_max_position: usize,
        /// If true, the ends of the ramp are rounded to whole dimensions, which is the usual choice.
        truncate: bool,
    },
    /// `LongRoPE` (Ding et al., 2024): each frequency is divided by its own factor, found by a search.
    /// Requests within the original context use one list of factors, and longer requests use another.
    LongRope {
        /// Divisors for requests within the original context, one per pair.
        short_factor: Vec<f64>,
        /// Divisors for longer requests, one per pair.
        long_factor: Vec<f64>,
        /// Factor by which cos and sin are multiplied when a query or a key is rotated, in both regimes.
        attention_factor: f64,
        /// Context length that the model was originally trained with, in positions.
        original_max_position: usize,
    },
}

/// The specification of a layer's rotary embedding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Number of leading elements of a row that are rotated: `head_dim`, or less for partial rotary
    /// embeddings.
    pub rotary_dim: usize,
    /// Base of the frequencies, for example 10000 or 500000.
    pub theta: f64,
    /// The rule that determines which two elements form a pair.
    pub pairing: Pairing,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// Creates the usual embedding: all of `head_dim` is rotated in half-split pairs, without scaling.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        Self { rotary_dim: head_dim, theta, pairing: Pairing::HalfSplit, scaling: RopeScaling::None }
    }

    /// Returns the factor applied to cos and sin when a row is first rotated: 1 except for `YaRN` and
    /// `LongRoPE`.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.0,
        }
    }

    /// Returns the maximum number of positions per request, for a model whose config allows `model`
    /// positions. For dynamic NTK this is the larger of `model` and `factor` times the original context; for
    /// other scalings it is `model`.
    pub fn max_positions(&self, model: usize) -> usize {
        match self.scaling {
            RopeScaling::DynamicNtk { factor, original_max_position } => {
                model.max((original_max_position as f64 * factor) as usize)
            }
            _ => model,
        }
    }

    /// Checks every parameter.
    ///
    /// # Errors
    /// Returns [`Error::InvalidRope`] with the name and value of the first invalid parameter.
    pub fn check(&self) -> Result<()> {
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) {
            return invalid(format!("rotary_dim {} must be even and positive", self.rotary_dim));
        }
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return invalid(format!("theta {} is not above 1", self.theta));
        }
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::StaticNtk { factor } => {
                self.check_ntk()?;
                positive("factor", *factor)
            }
            RopeScaling::DynamicNtk { factor, original_max_position } => {
                self.check_ntk()?;
                if !(factor.is_finite() && *factor >= 1.0) {
                    return invalid(format!("factor {factor} is below 1"));
                }
                positive("original_max_position", *original_max_position as f64)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                positive("factor", *factor)?;
                if high_freq_factor <= low_freq_factor || *low_freq_factor <= 0.0 {
                    return invalid(format!(
                        "high_freq_factor {high_freq_factor} must be above low_freq_factor {low_freq_factor} > 0"
                    ));
                }
                positive("original_max_position", *original_max_position as f64)
            }
            RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_position,
                ..
            } => {
                positive("factor", *factor)?;
                positive("attention_factor", *attention_factor)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                positive("original_max_position", *original_max_position as f64)
            }
            RopeScaling::LongRope { short_factor, long_factor, attention_factor, original_max_position } => {
                self.check_divisors("short_factor", short_factor)?;
                self.check_divisors("long_factor", long_factor)?;
                positive("attention_factor", *attention_factor)?;
                positive("original_max_position", *original_max_position as f64)
            }
        }
    }

    /// Checks that the embedding has more than one pair, because the exponent `d / (d − 2)` is undefined for
    /// one pair.
    fn check_ntk(&self) -> Result<()> {
        if self.rotary_dim > 2 {
            Ok(())
        } else {
            invalid(format!("rotary_dim {} is too small for NTK scaling", self.rotary_dim))
        }
    }

    fn check_divisors(&self, what: &str, divisors: &[f64]) -> Result<()> {
        if divisors.len() != self.rotary_dim / 2 {
            let (got, dim) = (divisors.len(), self.rotary_dim);
            return invalid(format!("{what} has {got} numbers, rotary_dim {dim} requires {}", dim / 2));
        }
        divisors.iter().try_for_each(|&divisor| positive(what, divisor))
    }
}

pub(super) fn invalid<T>(reason: String) -> Result<T> {
    Err(Error::InvalidRope(reason))
}

fn positive(what: &str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 { Ok(()) } else { invalid(format!("{what} {value} is not positive")) }
}
