//! Computes the frequencies of a regime in f32, with the same operations in the same order as Hugging Face
//! transformers, so that the results are equal.

use std::f32::consts::PI;

use super::config::invalid;
use super::{Regime, RopeConfig, RopeScaling};
use crate::base::Result;

impl RopeConfig {
    /// Returns one frequency per pair, in radians per position.
    ///
    /// # Errors
    /// Returns [`Error::InvalidRope`](crate::Error::InvalidRope) for a parameter outside its domain, or if
    /// this scaling does not have `regime`.
    pub fn frequencies_for(&self, regime: Regime) -> Result<Vec<f32>> {
        self.check()?;
        if !self.has(regime) {
            return invalid(format!("{:?} has no regime {regime:?}", self.scaling));
        }
        let frequencies = match &self.scaling {
            RopeScaling::None => self.trained(),
            RopeScaling::Linear { factor } => self.trained().iter().map(|f| f / *factor as f32).collect(),
            RopeScaling::StaticNtk { factor } => {
                let exponent = self.ntk_exponent();
                reciprocals(self.periods((self.theta * factor.powf(exponent)) as f32))
            }
            RopeScaling::DynamicNtk { factor, original_max_position } => match regime {
                Regime::Length(n) => {
                    let (factor, original) = (*factor as f32, *original_max_position as f32);
                    let stretch = factor * n as f32 / original - (factor - 1.0);
                    let power = f64::from(stretch).powf(self.ntk_exponent()) as f32;
                    let theta = self.theta as f32 * power;
                    reciprocals(self.periods(theta))
                }
                _ => self.trained(),
            },
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let (factor, original) = (*factor as f32, *original_max_position as f32);
                let (low, width) = (*low_freq_factor as f32, (high_freq_factor - low_freq_factor) as f32);
                let scaled = |f: &f32| {
                    let wavelength = 2.0 * PI / f;
                    let smooth = ((original / wavelength - low) / width).clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor + smooth * f
                };
                self.trained().iter().map(scaled).collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } => {
                let (low, high) =
                    self.yarn_ramp(*beta_fast, *beta_slow, *original_max_position as f64, *truncate);
                let scaled = |(i, period): (usize, f32)| {
                    let kept = 1.0 - ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    1.0 / (*factor as f32 * period) * (1.0 - kept) + 1.0 / period * kept
                };
                self.periods(self.theta as f32).enumerate().map(scaled).collect()
            }
            RopeScaling::LongRope { short_factor, long_factor, .. } => {
                let divisors = if regime == Regime::Long { long_factor } else { short_factor };
                let periods = self.periods(self.theta as f32).zip(divisors);
                reciprocals(periods.map(|(period, divisor)| *divisor as f32 * period))
            }
        };
        match frequencies.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
            Some(f) => invalid(format!("a frequency is {f}")),
            None => Ok(frequencies),
        }
    }

    /// Returns the frequencies without scaling.
    fn trained(&self) -> Vec<f32> {
        reciprocals(self.periods(self.theta as f32))
    }

    // Decision: docs/decisions/base.md#frequencies-are-computed-as-in-transformers
    /// Returns the period of each pair `i`, in positions per radian: `theta^(2 i / d)`.
    fn periods(&self, theta: f32) -> impl Iterator<Item = f32> {
        let d = self.rotary_dim;
        (0..d / 2).map(move |i| theta.powf((2 * i) as f32 / d as f32))
    }

    /// Returns `p = d / (d − 2)`. Multiplying theta by `s^p` divides the lowest frequency by `s`.
    fn ntk_exponent(&self) -> f64 {
        self.rotary_dim as f64 / (self.rotary_dim as f64 - 2.0)
    }

    /// Returns the first and the last dimension of `YaRN`'s ramp between kept and interpolated frequencies.
    fn yarn_ramp(&self, fast: f64, slow: f64, original: f64, truncate: bool) -> (f64, f64) {
        let dim = self.rotary_dim as f64;
        let dimension_of = |rotations: f64| {
            dim * (original / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
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

fn reciprocals(values: impl Iterator<Item = f32>) -> Vec<f32> {
    values.map(|x| 1.0 / x).collect()
}
