//! What a model says about its rotary embedding, and the frequencies that follow.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Which elements form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pairing {
    /// Element `i` with `i + rotary_dim / 2` (Llama, Qwen, Mistral in the Hugging Face layout).
    HalfSplit,
    /// Element `2 i` with `2 i + 1` (GPT-J, DeepSeek's stored layout).
    Interleaved,
}

/// How frequencies are stretched for contexts longer than those trained on. All of these are fixed
/// for a model, so keys rotated under them may be reused anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Position interpolation: all frequencies divided by `factor`.
    Linear {
        /// Ratio of the extended to the trained context.
        factor: f64,
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
}

/// A model's rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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

    /// One frequency per pair, in f32 as the model was trained with.
    ///
    /// # Errors
    /// [`Error::InvalidRope`] for an odd rotary dimension or parameters out of their domain.
    pub fn frequencies(&self) -> Result<Vec<f32>> {
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) {
            return Err(Error::InvalidRope(format!(
                "rotary_dim {} is not even and positive",
                self.rotary_dim
            )));
        }
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return Err(Error::InvalidRope(format!("theta {} is not above 1", self.theta)));
        }
        if let RopeScaling::Yarn { attention_factor, beta_fast, beta_slow, .. } = self.scaling {
            positive("attention_factor", attention_factor)?;
            positive("beta_fast", beta_fast)?;
            positive("beta_slow", beta_slow)?;
        }
        let base = (0..self.rotary_dim / 2)
            .map(|i| 1.0 / (self.theta as f32).powf((2 * i) as f32 / self.rotary_dim as f32));
        let frequencies: Vec<f32> = match self.scaling {
            RopeScaling::None => base.collect(),
            RopeScaling::Linear { factor } => {
                positive("factor", factor)?;
                base.map(|f| f / factor as f32).collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                positive("factor", factor)?;
                if high_freq_factor <= low_freq_factor || low_freq_factor <= 0.0 {
                    return Err(Error::InvalidRope(format!(
                        "high_freq_factor {high_freq_factor} must be above low_freq_factor {low_freq_factor} > 0"
                    )));
                }
                positive("original_max_position", original_max_position as f64)?;
                let original = original_max_position as f32;
                let (low, high) = (low_freq_factor as f32, high_freq_factor as f32);
                base.map(|f| {
                    let wavelength = 2.0 * std::f32::consts::PI / f;
                    let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor as f32 + smooth * f
                })
                .collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } => {
                positive("factor", factor)?;
                positive("original_max_position", original_max_position as f64)?;
                let (low, high) = self.yarn_ramp(beta_fast, beta_slow, original_max_position, truncate);
                base.enumerate()
                    .map(|(i, f)| {
                        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                        f / factor as f32 * ramp + f * (1.0 - ramp)
                    })
                    .collect()
            }
        };
        match frequencies.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
            Some(f) => Err(Error::InvalidRope(format!("a frequency is {f}"))),
            None => Ok(frequencies),
        }
    }

    /// What cos and sin are multiplied by: 1 but for `YaRN`.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }

    /// First and last dimension of `YaRN`'s ramp between kept and interpolated frequencies.
    fn yarn_ramp(&self, fast: f64, slow: f64, original: usize, truncate: bool) -> (f64, f64) {
        let dim = self.rotary_dim as f64;
        let dimension_of = |rotations: f64| {
            dim * (original as f64 / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (dimension_of(fast), dimension_of(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        (low, high)
    }
}

fn positive(what: &str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(Error::InvalidRope(format!("{what} {value} is not positive")))
    }
}
