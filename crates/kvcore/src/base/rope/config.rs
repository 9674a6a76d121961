//! What a model says about its rotary embedding.

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result};

/// Which elements form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pairing {
    /// Element `i` with `i + rotary_dim / 2` (Llama, Qwen, Mistral in the Hugging Face layout).
    HalfSplit,
    /// Element `2 i` with `2 i + 1` (GPT-J, DeepSeek's stored layout).
    Interleaved,
}

/// How frequencies are stretched for contexts longer than those trained on.
///
/// Most scalings have one vector of frequencies, so keys rotated under them may be reused anywhere.
/// [`DynamicNtk`](Self::DynamicNtk) and [`LongRope`](Self::LongRope) have several, one a
/// [`Regime`](crate::base::Regime).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Position interpolation (Chen et al., 2023): all frequencies divided by `factor`.
    Linear {
        /// Ratio of the extended to the trained context.
        factor: f64,
    },
    /// NTK-aware scaling (bloc97, 2023): theta multiplied once by `factor^(d / (d − 2))`, where `d` is
    /// the rotary dimension. The lowest frequency is divided by `factor`, the highest is kept.
    StaticNtk {
        /// Ratio of the extended to the trained context.
        factor: f64,
    },
    /// Dynamic NTK (emozilla, 2023): as trained up to the original context; for `n` positions beyond it
    /// theta is multiplied by `(factor * n / original − (factor − 1))^(d / (d − 2))`.
    DynamicNtk {
        /// Ratio of the longest to the trained context.
        factor: f64,
        /// Context length of the original training.
        original_max_position: usize,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a smooth ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled fully.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_max_position: usize,
    },
    /// YaRN (Peng et al., 2023): interpolation by parts, and an attention factor on cos and sin.
    Yarn {
        /// Ratio of the extended to the trained context.
        factor: f64,
        /// Multiplies cos and sin of queries and of keys, each once.
        attention_factor: f64,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which it is fully interpolated.
        beta_slow: f64,
        /// Context length of the original training.
        original_max_position: usize,
        /// Whether the ends of the ramp are rounded to whole dimensions (the usual choice).
        truncate: bool,
    },
    /// `LongRoPE` (Ding et al., 2024): each frequency divided by a searched factor of its own, from one list
    /// up to the original context and from another beyond it.
    LongRope {
        /// Divisors of requests within the original context, one a pair.
        short_factor: Vec<f64>,
        /// Divisors of longer requests, one a pair.
        long_factor: Vec<f64>,
        /// Multiplies cos and sin of queries and of keys, each once, in both regimes.
        attention_factor: f64,
        /// Context length of the original training.
        original_max_position: usize,
    },
}

/// The rotary embedding of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Elements of a row that are rotated: all of a head, or fewer for partial rotary embeddings.
    pub rotary_dim: usize,
    /// Base of the frequencies, e.g. 10000 or 500000.
    pub theta: f64,
    /// Which elements form a pair.
    pub pairing: Pairing,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// The usual embedding: all of `head_dim` rotated in half-split pairs, no scaling.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        Self { rotary_dim: head_dim, theta, pairing: Pairing::HalfSplit, scaling: RopeScaling::None }
    }

    /// What cos and sin are multiplied by when a row is first rotated: 1 but for `YaRN` and `LongRoPE`.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.0,
        }
    }

    /// Positions that a model made for `model` positions may use: dynamic NTK goes on to `factor` times
    /// the original context, the others end where the model says.
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
    /// [`Error::InvalidRope`] that names the parameter and its value.
    pub fn check(&self) -> Result<()> {
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) {
            return invalid(format!("rotary_dim {} is not even and positive", self.rotary_dim));
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

    /// With a single pair the exponent `d / (d − 2)` has no value.
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
            return invalid(format!("{what} has {got} numbers, rotary_dim {dim} asks for {}", dim / 2));
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
