//! The measured time that computing takes, with which loads are compared.

use std::time::Duration;

use parking_lot::Mutex;

/// The number of tokens after which a measurement is relied on. Shorter passes take longer per token.
const SURE: usize = 1024;

/// The part of earlier passes that is kept when another pass is measured.
const KEPT: f64 = 0.75;

/// The part of a stored time that is relied on. The process that stored it also copied and wrote records meanwhile, which
/// took it up to a quarter longer than computing alone.
const RELIED_ON: f64 = 0.8;

/// The moving average of a prefill's time per token, in which longer passes weigh more. Shared by an engine with its
/// tier.
#[derive(Debug, Default)]
pub struct PrefillRate(Mutex<Passes>);

#[derive(Debug, Default)]
struct Passes {
    seconds: f64,
    tokens: f64,
    /// The number of all tokens, of which nothing is forgotten.
    all: usize,
}

impl PrefillRate {
    /// Records how long a pass took to compute `tokens` tokens.
    pub fn computed(&self, tokens: usize, elapsed: Duration) {
        let mut passes = self.0.lock();
        passes.seconds = KEPT * passes.seconds + elapsed.as_secs_f64();
        passes.tokens = KEPT * passes.tokens + tokens as f64;
        passes.all = passes.all.saturating_add(tokens);
    }

    /// Returns the time to compute `tokens` tokens, or zero if nothing was measured.
    pub(super) fn cost(&self, tokens: usize) -> Duration {
        let passes = self.0.lock();
        let seconds = if passes.tokens > 0.0 { passes.seconds / passes.tokens * tokens as f64 } else { 0.0 };
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    /// Returns the time to compute `tokens` tokens, which took the time `stored` when they were stored. Zero means that
    /// a time is not known. As long as too few tokens were measured, the smaller of this engine's time and four fifths of
    /// the stored one is returned, so that a request does not wait longer than computing takes.
    pub(super) fn cost_now(&self, tokens: usize, stored: Duration) -> Duration {
        let (own, stored) = (self.cost(tokens), stored.mul_f64(RELIED_ON));
        let is_sure = self.0.lock().all >= SURE;
        match (own.is_zero(), stored.is_zero()) {
            (true, _) => stored,
            (false, false) if !is_sure => own.min(stored),
            (false, _) => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_measured_tokens_do_not_make_a_request_wait() {
        let (rate, second) = (PrefillRate::default(), Duration::from_secs(1));
        assert_eq!((rate.cost(100), rate.cost_now(100, second.mul_f64(2.5))), (Duration::ZERO, 2 * second));
        rate.computed(50, 5 * second);
        assert_eq!(rate.cost(100), 10 * second);
        assert_eq!(
            rate.cost_now(100, second.mul_f64(2.5)),
            2 * second,
            "a short pass takes longer per token"
        );
        assert_eq!(rate.cost_now(100, 20 * second), 10 * second, "it was stored on a slower machine");
        assert_eq!(rate.cost_now(100, Duration::ZERO), 10 * second, "it was stored without a time");
        rate.computed(2000, 40 * second);
        let cost = rate.cost(100);
        assert!((2.0..2.3).contains(&cost.as_secs_f64()), "longer passes weigh more: {cost:?}");
        assert_eq!(rate.cost_now(100, second), cost);
    }
}
