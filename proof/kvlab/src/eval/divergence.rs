//! Divergence: how far next-token distributions are from full attention's.

/// Means over an answer's tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Divergence {
    /// The Kullback–Leibler divergence from full attention, in nats.
    pub(super) nats: f64,
    /// The share of tokens where the most likely choice is the same as full attention's.
    pub(super) agreement: f64,
}

/// Returns the logarithms of the probabilities.
fn log_softmax(logits: &[f32]) -> impl Iterator<Item = f64> + Clone {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
    let shift = f64::from(most) + sum.ln();
    logits.iter().map(move |&x| f64::from(x) - shift)
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
}

impl Divergence {
    /// Compares two lists of logits, token by token, up to the end of the shorter list. Returns `None` if one
    /// of the lists is empty.
    pub(super) fn of(full: &[Vec<f32>], other: &[Vec<f32>]) -> Option<Self> {
        let n = full.len().min(other.len());
        if n == 0 {
            return None;
        }
        let pairs = || full.iter().zip(other);
        let of_token = |(full, other): (&Vec<f32>, &Vec<f32>)| -> f64 {
            let terms = log_softmax(full).zip(log_softmax(other));
            terms.map(|(p, q)| if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }).sum()
        };
        let agreed = pairs().filter(|(full, other)| likeliest(full) == likeliest(other)).count();
        Some(Self {
            // Rounding may leave a value slightly below 0.
            nats: pairs().map(of_token).sum::<f64>().max(0.0) / n as f64,
            agreement: agreed as f64 / n as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_follow_their_definition() {
        let ln = |x: f32| x.ln();
        let full = vec![vec![ln(0.5), ln(0.5)], vec![ln(0.9), ln(0.1)]];
        let other = vec![vec![ln(0.25), ln(0.75)], vec![ln(0.9) + 7.0, ln(0.1) + 7.0]];
        let found = Divergence::of(&full, &other).unwrap();
        let first = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((found.nats - first / 2.0).abs() < 1e-6, "{found:?}");
        // Of two equal logits, the first counts.
        assert_eq!(found.agreement, 0.5);
        let none = Divergence::of(&full, &full).unwrap();
        assert_eq!((none.nats, none.agreement), (0.0, 1.0));
        assert_eq!(Divergence::of(&[], &full), None);
    }
}
