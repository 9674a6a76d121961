//! Log-probabilities of tokens.

use serde::Serialize;

/// The log-probability of a token of an answer, and those of the likeliest tokens at its place: of the model's own distribution, before
/// temperature, penalties and filters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens with theirs, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Returns the log-probability of `token`, with those of the `most` likeliest.
    pub(crate) fn of(logits: &[f32], token: u32, most: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
        let whole = f64::from(largest) + sum.ln();
        let of = |token: u32| {
            let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
            (f64::from(logit) - whole) as f32
        };
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let descending =
            |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
        let most = most.min(order.len());
        if most < order.len() && most > 0 {
            order.select_nth_unstable_by(most - 1, descending);
        }
        order.truncate(most);
        order.sort_unstable_by(descending);
        Self { token, logprob: of(token), top: order.into_iter().map(|token| (token, of(token))).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_to_one_and_the_likeliest_come_first() {
        let logits = [1000.0, 1001.0, 999.0, 1001.0];
        let all = TokenLogprobs::of(&logits, 2, 9);
        assert_eq!(all.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 0, 2]);
        let sum: f32 = all.top.iter().map(|t| t.1.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(all.logprob, all.top[3].1);
        assert_eq!(TokenLogprobs::of(&logits, 0, 1).top.len(), 1);
        assert_eq!(TokenLogprobs::of(&logits, 0, 0).top, []);
        assert_eq!(TokenLogprobs::of(&logits, 7, 0).logprob, f32::NEG_INFINITY);
    }
}
