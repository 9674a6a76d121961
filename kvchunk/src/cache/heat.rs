//! The heat of a piece: a measure of how often it was used lately.

/// The time after which a use counts half, in milliseconds: ten minutes.
const HALF_LIFE: f64 = 600_000.0;

/// The uses of a piece, of which older ones count less.
///
/// The heat is `1 − 2^−u`, where `u` is the number of uses, each of them halved every ten minutes since then. After one
/// use, the heat is 0.5 and falls. After two uses within four minutes it is above 0.7, as it is after several uses over
/// a longer time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Heat {
    uses: f64,
    /// The time of the last use, in milliseconds.
    at: u64,
}

impl Heat {
    /// Returns the heat of a piece that is used for the first time.
    pub(crate) fn first(now: u64) -> Self {
        Self { uses: 1.0, at: now }
    }

    /// Adds a use.
    pub(crate) fn touch(&mut self, now: u64) {
        *self = Self { uses: self.uses(now) + 1.0, at: now };
    }

    /// Returns the heat, from 0 to 1.
    pub(crate) fn now(&self, now: u64) -> f64 {
        1.0 - (-self.uses(now)).exp2()
    }

    fn uses(&self, now: u64) -> f64 {
        self.uses * (-(now.saturating_sub(self.at) as f64) / HALF_LIFE).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000;

    #[test]
    fn heat_grows_with_uses_and_halves_with_time() {
        let mut heat = Heat::first(0);
        assert_eq!(heat.now(0), 0.5);
        assert!((heat.now(10 * MINUTE) - (1.0 - 0.5_f64.sqrt())).abs() < 1e-12, "half a use");
        assert!(heat.now(1000 * MINUTE) < 1e-9);
        heat.touch(4 * MINUTE);
        assert!(heat.now(4 * MINUTE) > 0.70, "twice in four minutes: {}", heat.now(4 * MINUTE));
        let mut seldom = Heat::first(0);
        seldom.touch(5 * MINUTE);
        assert!(seldom.now(5 * MINUTE) < 0.70, "twice in five minutes: {}", seldom.now(5 * MINUTE));
        // A use every ten minutes approaches two uses, and a heat of 0.75.
        let mut regular = Heat::first(0);
        for use_ in 1..20 {
            regular.touch(use_ * 10 * MINUTE);
        }
        assert!((regular.now(190 * MINUTE) - 0.75).abs() < 1e-3);
        for _ in 0..2000 {
            regular.touch(190 * MINUTE);
        }
        assert!(regular.now(190 * MINUTE) <= 1.0);
    }

    #[test]
    fn a_clock_that_goes_backwards_does_no_harm() {
        let mut heat = Heat::first(MINUTE);
        heat.touch(0);
        assert_eq!(heat.now(0), 0.75);
    }
}
