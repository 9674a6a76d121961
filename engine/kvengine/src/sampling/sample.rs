//! Sampling: chooses a token from logits.
//!
//! The steps have the same order and definitions as in transformers: repetition penalty, temperature, top-k,
//! top-p, min-p, draw. Presence and frequency penalties and biases are applied right after the repetition
//! penalty. A step with a neutral setting is skipped.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::constraint::TokenMask;
use crate::request::Sampling;

/// A sampler: the settings, the tokens seen so far and the state of the random generator.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: StdRng,
    /// For each token, true if it has been seen so far; empty if there is no repetition penalty.
    seen: Vec<bool>,
    /// The number of occurrences of each token in the answer; empty if there is no presence or frequency
    /// penalty.
    counts: Vec<u32>,
    /// The biases to add to the logits of individual tokens.
    bias: Arc<[(u32, f32)]>,
    /// The scores of all tokens in the vocabulary. The memory is reused for every draw.
    scores: Vec<f32>,
    /// Tokens, ordered by score. The memory is reused for every draw.
    order: Vec<u32>,
}

impl Sampler {
    /// Creates a sampler that has seen no tokens.
    pub fn new(sampling: Sampling) -> Self {
        let rng = StdRng::seed_from_u64(sampling.seed);
        Self {
            sampling,
            rng,
            seen: Vec::new(),
            counts: Vec::new(),
            bias: Arc::default(),
            scores: Vec::new(),
            order: Vec::new(),
        }
    }

    /// Sets the biases to add to the logits of individual tokens. Negative infinity excludes a token. Tokens
    /// outside the vocabulary are ignored.
    #[must_use]
    pub fn with_bias(self, bias: Arc<[(u32, f32)]>) -> Self {
        Self { bias, ..self }
    }

    /// Records a token that was added to the answer.
    pub fn chose(&mut self, token: u32) {
        self.see([token]);
        if self.penalizes_answer() {
            let at = token as usize;
            if self.counts.len() <= at {
                self.counts.resize(at + 1, 0);
            }
            self.counts[at] += 1;
        }
    }

    fn penalizes_answer(&self) -> bool {
        self.sampling.presence_penalty != 0.0 || self.sampling.frequency_penalty != 0.0
    }

    /// Records prompt tokens, which a repetition penalty makes less likely.
    pub fn see(&mut self, tokens: impl IntoIterator<Item = u32>) {
        if self.sampling.repetition_penalty == 1.0 {
            return;
        }
        for token in tokens {
            let token = token as usize;
            if self.seen.len() <= token {
                self.seen.resize(token + 1, false);
            }
            self.seen[token] = true;
        }
    }

    /// Chooses a token. At temperature 0, chooses the likeliest token, or the one with the lowest ID in case
    /// of a tie. Does not choose a token whose logit is NaN if another token can be chosen.
    ///
    /// The choice is not recorded, because the caller may replace it. Call [`chose`](Self::chose) with the
    /// token that is added to the answer.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let greedy = self.sampling.temperature <= 0.0;
        let plain =
            self.sampling.repetition_penalty == 1.0 && !self.penalizes_answer() && self.bias.is_empty();
        if greedy && plain {
            return argmax(logits);
        }
        self.scores.clear();
        self.scores.extend(logits.iter().map(|&x| if x.is_nan() { f32::NEG_INFINITY } else { x }));
        self.choose()
    }

    /// Chooses one of the `allowed` tokens, as [`sample`](Self::sample) chooses one of all tokens. The other tokens count
    /// as excluded from the start. Returns `None` if no allowed token can be chosen, because a bias excludes it or its
    /// logit is not a number.
    pub fn sample_among(&mut self, logits: &[f32], allowed: &TokenMask) -> Option<u32> {
        self.scores.clear();
        self.scores.resize(logits.len(), f32::NEG_INFINITY);
        for token in allowed.tokens() {
            let Some((score, &logit)) = self.scores.get_mut(token as usize).zip(logits.get(token as usize))
            else {
                break;
            };
            *score = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        }
        let chosen = self.choose();
        (self.scores.get(chosen as usize).is_some_and(|score| *score > f32::NEG_INFINITY)).then_some(chosen)
    }

    /// Chooses a token from the scores.
    fn choose(&mut self) -> u32 {
        self.penalize();
        let max = self.max();
        if self.sampling.temperature <= 0.0 || !max.is_finite() {
            return argmax(&self.scores);
        }
        // Differences from the largest score keep it finite, however small the temperature is.
        for score in &mut self.scores {
            *score = (*score - max) / self.sampling.temperature;
        }
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    fn penalize(&mut self) {
        let penalty = self.sampling.repetition_penalty;
        for (score, _) in self.scores.iter_mut().zip(&self.seen).filter(|(_, seen)| **seen) {
            *score = if *score > 0.0 { *score / penalty } else { *score * penalty };
        }
        let Sampling { presence_penalty, frequency_penalty, .. } = self.sampling;
        for (score, &count) in self.scores.iter_mut().zip(&self.counts).filter(|(_, count)| **count > 0) {
            *score -= presence_penalty + frequency_penalty * count as f32;
        }
        for &(token, bias) in self.bias.iter() {
            if let Some(score) = self.scores.get_mut(token as usize) {
                *score += bias;
            }
        }
    }

    fn keep_top_k(&mut self) {
        let k = self.sampling.top_k;
        if k == 0 || k >= self.scores.len() {
            return;
        }
        self.order.clear();
        self.order.extend(0..self.scores.len() as u32);
        let scores = &self.scores;
        let descending = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]);
        let (_, &mut last, _) = self.order.select_nth_unstable_by(k - 1, descending);
        let least = self.scores[last as usize];
        self.remove(|score| score < least);
    }

    fn keep_top_p(&mut self) {
        if self.sampling.top_p >= 1.0 {
            return;
        }
        let max = self.max();
        let weight = |score: f32| f64::from(score - max).exp();
        self.order.clear();
        self.order.extend((0..).zip(&self.scores).filter(|(_, x)| x.is_finite()).map(|(token, _)| token));
        let scores = &self.scores;
        // The sort is stable, so equally likely tokens keep their order.
        self.order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
        let total: f64 = self.order.iter().map(|&token| weight(scores[token as usize])).sum();
        let wanted = f64::from(self.sampling.top_p) * total;
        let mut sum = 0.0;
        for &token in &self.order {
            if sum >= wanted {
                self.scores[token as usize] = f32::NEG_INFINITY;
            } else {
                sum += weight(self.scores[token as usize]);
            }
        }
    }

    fn keep_min_p(&mut self) {
        let (max, min_p) = (self.max(), self.sampling.min_p);
        if min_p > 0.0 {
            self.remove(|score| (score - max).exp() < min_p);
        }
    }

    fn remove(&mut self, unfit: impl Fn(f32) -> bool) {
        for score in &mut self.scores {
            if unfit(*score) {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    fn max(&self) -> f32 {
        self.scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    fn draw(&mut self) -> u32 {
        let max = self.max();
        let weight = |score: f32| f64::from(score - max).exp();
        let total: f64 = self.scores.iter().map(|&x| weight(x)).filter(|w| w.is_finite()).sum();
        let mut left = self.rng.random::<f64>() * total;
        for (token, &score) in self.scores.iter().enumerate() {
            let w = weight(score);
            if w.is_finite() {
                left -= w;
                if left < 0.0 {
                    return token as u32;
                }
            }
        }
        argmax(&self.scores)
    }
}

/// Returns the index of the largest logit, or the lowest such index if there is a tie. Returns 0 if all
/// logits are NaN.
fn argmax(logits: &[f32]) -> u32 {
    // The compiler vectorises independent lanes. A comparison with NaN is false.
    const LANES: usize = 32;
    let mut most = [f32::NEG_INFINITY; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (most, &x) in most.iter_mut().zip(chunk) {
            *most = if x > *most { x } else { *most };
        }
    }
    let largest = most.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    logits.iter().position(|&x| x == largest).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Returns logits that give these probabilities.
    fn logits_of(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    /// Returns the tokens that 2000 draws choose at least once, in ascending order.
    fn drawn(sampling: Sampling, logits: &[f32]) -> Vec<u32> {
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, ..sampling });
        let mut tokens: Vec<u32> = (0..2000).map(|_| sampler.sample(logits)).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    const NEUTRAL: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let mut sampler = Sampler::new(Sampling::default());
        assert_eq!(sampler.sample(&[0.0, 3.0, f32::NAN, 3.0]), 1);
    }

    #[test]
    fn draws_follow_the_distribution_and_the_seed() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, f32::NAN];
        let draw = |seed| {
            let mut sampler = Sampler::new(Sampling { seed, ..NEUTRAL });
            (0..3000).map(|_| sampler.sample(&logits)).collect::<Vec<_>>()
        };
        let tokens = draw(7);
        let ones = tokens.iter().filter(|&&t| t == 1).count();
        assert!((1850..2150).contains(&ones) && tokens.iter().all(|&t| t < 2), "{ones}");
        assert_eq!(tokens, draw(7));
        assert_ne!(tokens, draw(8));
    }

    // For the probabilities 0.1, 0.4, 0.2, 0.3, the sets are worked out by hand from the definitions.
    #[rstest]
    #[case::all(NEUTRAL, &[0, 1, 2, 3])]
    #[case::top_k(Sampling { top_k: 2, ..NEUTRAL }, &[1, 3])]
    #[case::a_top_k_above_the_vocabulary(Sampling { top_k: 9, ..NEUTRAL }, &[0, 1, 2, 3])]
    #[case::top_p_reached_by_two(Sampling { top_p: 0.69, ..NEUTRAL }, &[1, 3])]
    #[case::top_p_that_two_do_not_reach(Sampling { top_p: 0.71, ..NEUTRAL }, &[1, 2, 3])]
    #[case::top_p_keeps_one_at_least(Sampling { top_p: 1e-9, ..NEUTRAL }, &[1])]
    #[case::min_p(Sampling { min_p: 0.49, ..NEUTRAL }, &[1, 2, 3])]
    #[case::a_higher_min_p(Sampling { min_p: 0.51, ..NEUTRAL }, &[1, 3])]
    #[case::min_p_of_one(Sampling { min_p: 1.0, ..NEUTRAL }, &[1])]
    // Of the two tokens that top-k keeps, the first has 0.4 / 0.7 = 0.57; among all tokens it has 0.4.
    #[case::top_p_of_what_top_k_keeps(Sampling { top_k: 2, top_p: 0.55, ..NEUTRAL }, &[1])]
    #[case::top_p_of_all(Sampling { top_p: 0.55, ..NEUTRAL }, &[1, 3])]
    fn filters_keep_the_tokens_of_their_definitions(#[case] sampling: Sampling, #[case] kept: &[u32]) {
        assert_eq!(drawn(sampling, &logits_of(&[0.1, 0.4, 0.2, 0.3])), kept);
    }

    #[test]
    fn ties_at_the_border_stay_in_top_k_and_the_first_stay_in_top_p() {
        let even = [0.0; 4];
        assert_eq!(drawn(Sampling { top_k: 2, ..NEUTRAL }, &even), [0, 1, 2, 3]);
        assert_eq!(drawn(Sampling { top_p: 0.5, ..NEUTRAL }, &even), [0, 1]);
    }

    #[test]
    fn temperature_comes_before_the_filters() {
        // At temperature 2, probabilities 0.2 and 0.8 become 1/3 and 2/3.
        let sampling = Sampling { temperature: 2.0, top_p: 0.7, ..NEUTRAL };
        let mut sampler = Sampler::new(sampling);
        let logits = logits_of(&[0.2, 0.8]);
        assert!((0..200).any(|_| sampler.sample(&logits) == 0));
        assert_eq!(drawn(Sampling { top_p: 0.7, ..NEUTRAL }, &logits), [1]);
    }

    #[test]
    fn a_penalty_divides_logits_above_zero_and_multiplies_those_below_once_a_token() {
        let choose = |penalty, seen: &[u32], logits: &[f32]| {
            let mut sampler = Sampler::new(Sampling { repetition_penalty: penalty, ..Sampling::default() });
            sampler.see(seen.iter().copied());
            sampler.sample(logits)
        };
        assert_eq!(choose(1.0, &[0], &[3.0, 2.0]), 0);
        assert_eq!(choose(1.4, &[0], &[3.0, 2.0]), 0, "3 / 1.4 is above 2");
        assert_eq!(choose(1.6, &[0], &[3.0, 2.0]), 1, "3 / 1.6 is below 2");
        assert_eq!(choose(1.4, &[0, 0, 0], &[3.0, 2.0]), 0, "a token is punished once");
        assert_eq!(choose(1.4, &[0], &[-2.0, -3.0]), 0, "-2.8 is above -3");
        assert_eq!(choose(1.6, &[0], &[-2.0, -3.0]), 1, "-3.2 is below -3");
        assert_eq!(choose(1.6, &[7], &[3.0, 2.0]), 0, "a token beyond the logits");
    }

    #[test]
    fn penalties_on_the_answer_count_its_tokens_and_not_the_prompts() {
        let sampling = Sampling { presence_penalty: 0.5, frequency_penalty: 0.25, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling);
        sampler.see([0, 0, 0]);
        assert_eq!(sampler.sample(&[1.0, 0.4, 0.3]), 0, "the prompt does not count");
        sampler.chose(0);
        assert_eq!(sampler.sample(&[1.0, 0.4, 0.2]), 1, "1 − 0.5 − 0.25 is below 0.4");
        assert_eq!(sampler.sample(&[1.0, 0.2, 0.2]), 0);
        sampler.chose(0);
        assert_eq!(sampler.sample(&[1.0, 0.1, 0.0]), 1, "1 − 0.5 − 2 · 0.25 is 0");
    }

    #[test]
    fn a_bias_excludes_a_token_or_forces_one() {
        let biased = |bias: &[(u32, f32)]| {
            Sampler::new(Sampling::default()).with_bias(bias.into()).sample(&[1.0, 3.0, 2.0])
        };
        assert_eq!(biased(&[]), 1);
        assert_eq!(biased(&[(1, f32::NEG_INFINITY)]), 2);
        assert_eq!(biased(&[(0, 100.0), (9, 1000.0)]), 0);
    }

    #[rstest]
    #[case::greedy(Sampling::GREEDY)]
    #[case::drawn(NEUTRAL)]
    #[case::filtered(Sampling { top_k: 2, top_p: 0.9, min_p: 0.1, ..NEUTRAL })]
    #[case::penalised(Sampling { repetition_penalty: 3.0, presence_penalty: 2.0, ..NEUTRAL })]
    fn a_choice_among_some_tokens_is_the_choice_without_the_others(#[case] sampling: Sampling) {
        let logits = [5.0, 1.0, f32::NAN, 1.5, 9.0, 0.5, f32::INFINITY];
        let (allowed, kept) = ([1, 2, 3, 5, 80], [1, 3, 5]);
        let mut others = logits;
        for token in [0, 4, 6] {
            others[token] = f32::NEG_INFINITY;
        }
        let (mut among, mut all) = (Sampler::new(sampling), Sampler::new(sampling));
        for _ in 0..300 {
            let token = among.sample_among(&logits, &allowed.into_iter().collect()).unwrap();
            assert!(kept.contains(&token));
            assert_eq!(token, all.sample(&others));
            among.chose(token);
            all.chose(token);
        }
    }

    #[test]
    fn nothing_is_chosen_among_tokens_that_are_excluded() {
        let among = |bias: &[(u32, f32)], allowed: &[u32]| {
            let mut sampler = Sampler::new(NEUTRAL).with_bias(bias.into());
            sampler.sample_among(&[1.0, f32::NAN, 3.0], &allowed.iter().copied().collect())
        };
        assert_eq!(among(&[(0, f32::NEG_INFINITY)], &[0, 2]), Some(2));
        assert_eq!(among(&[(0, f32::NEG_INFINITY)], &[0, 1]), None);
        assert_eq!(among(&[(1, 100.0)], &[1, 7]), None);
        assert_eq!(among(&[(2, 100.0)], &[]), None);
        assert_eq!(among(&[(2, 100.0)], &[0]), Some(0), "a bias does not allow a token");
    }

    #[test]
    fn a_penalty_comes_before_top_k() {
        let mut sampler = Sampler::new(Sampling { top_k: 1, repetition_penalty: 2.0, ..NEUTRAL });
        sampler.see([0]);
        assert_eq!(sampler.sample(&[3.0, 2.0]), 1);
    }

    #[rstest]
    #[case(Sampling { top_p: -0.1, ..NEUTRAL }, "top_p")]
    #[case(Sampling { top_p: 0.0, ..NEUTRAL }, "top_p")]
    #[case(Sampling { top_p: f32::NAN, ..NEUTRAL }, "top_p")]
    #[case(Sampling { min_p: 1.1, ..NEUTRAL }, "min_p")]
    #[case(Sampling { repetition_penalty: 0.0, ..NEUTRAL }, "repetition_penalty")]
    #[case(Sampling { temperature: f32::INFINITY, ..NEUTRAL }, "temperature")]
    fn settings_outside_their_range_are_named(#[case] sampling: Sampling, #[case] name: &str) {
        let error = sampling.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
