//! Log-probabilities of tokens.

use crate::request::TokenLogprobs;

/// Returns the logarithm of the sum of the exponentials of all logits.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(largest) + logits.iter().map(|x| f64::from(x - largest).exp()).sum::<f64>().ln()
}

/// Returns the `most` likeliest tokens with their log-probabilities, likeliest first. Equally likely tokens
/// are ordered by ID.
pub(crate) fn likeliest(logits: &[f32], most: usize) -> Vec<(u32, f32)> {
    ranked(logits, most, log_sum_exp(logits))
}

fn ranked(logits: &[f32], most: usize, log_sum: f64) -> Vec<(u32, f32)> {
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    let descending = |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    let most = most.min(tokens.len());
    if most < tokens.len() && most > 0 {
        tokens.select_nth_unstable_by(most - 1, descending);
    }
    tokens.truncate(most);
    tokens.sort_unstable_by(descending);
    let logprob = |token: u32| (f64::from(logits[token as usize]) - log_sum) as f32;
    tokens.into_iter().map(|token| (token, logprob(token))).collect()
}

/// Returns the log-probabilities of `token` and of the `most` likeliest tokens.
pub(crate) fn token_logprobs(logits: &[f32], token: u32, most: usize) -> TokenLogprobs {
    let log_sum = log_sum_exp(logits);
    let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    TokenLogprobs { token, logprob: (f64::from(logit) - log_sum) as f32, top: ranked(logits, most, log_sum) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_to_one_and_the_likeliest_come_first() {
        let logits = [1000.0, 1001.0, 999.0, 1001.0];
        let all = token_logprobs(&logits, 2, 9);
        assert_eq!(all.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 0, 2]);
        let sum: f32 = all.top.iter().map(|t| t.1.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(all.logprob, all.top[3].1);
        assert_eq!(all.top, likeliest(&logits, 9));
        assert_eq!(token_logprobs(&logits, 0, 1).top.len(), 1);
        assert_eq!(token_logprobs(&logits, 0, 0).top, []);
        assert_eq!(token_logprobs(&logits, 7, 0).logprob, f32::NEG_INFINITY);
    }
}
