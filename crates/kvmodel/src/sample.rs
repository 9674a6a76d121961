//! Sampling: the choice of a token from its logits.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The settings of sampling.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sampling {
    /// The temperature. 0 takes the most likely token. Above 0, the logits are divided by the temperature and
    /// a token is drawn.
    pub temperature: f32,
    /// The seed of the draw.
    pub seed: u64,
}

/// A sampler: the temperature and the state of the random generator.
#[derive(Debug)]
pub struct Sampler {
    temperature: f32,
    rng: StdRng,
}

impl Sampler {
    /// Creates a sampler in its first state.
    pub fn new(sampling: Sampling) -> Self {
        Self { temperature: sampling.temperature, rng: StdRng::seed_from_u64(sampling.seed) }
    }

    /// Chooses a token. Takes the first of equally likely tokens if the temperature is 0. Never chooses NaN.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.temperature <= 0.0 {
            return argmax(logits);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |x: f32| f64::from((x - max) / self.temperature).exp();
        let total: f64 = logits.iter().map(|&x| weight(x)).filter(|w| w.is_finite()).sum();
        let mut left = self.rng.random::<f64>() * total;
        for (token, &logit) in logits.iter().enumerate() {
            let w = weight(logit);
            if w.is_finite() {
                left -= w;
                if left < 0.0 {
                    return token as u32;
                }
            }
        }
        argmax(logits)
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let better = |best: (u32, f32), (i, &x): (usize, &f32)| if x > best.1 { (i as u32, x) } else { best };
    logits.iter().enumerate().fold((0, f32::NEG_INFINITY), better).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let mut sampler = Sampler::new(Sampling::default());
        assert_eq!(sampler.sample(&[0.0, 3.0, f32::NAN, 3.0]), 1);
    }

    #[test]
    fn draws_follow_the_distribution_and_the_seed() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY];
        let draw = |seed| {
            let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed });
            (0..3000).map(|_| sampler.sample(&logits)).collect::<Vec<_>>()
        };
        let tokens = draw(7);
        let ones = tokens.iter().filter(|&&t| t == 1).count();
        assert!((1850..2150).contains(&ones) && !tokens.contains(&2), "{ones}");
        assert_eq!(tokens, draw(7));
        assert_ne!(tokens, draw(8));
    }
}
