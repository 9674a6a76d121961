//! The rule that decides which pieces are cold and may be put to sleep.

use std::time::Duration;

/// The rule that decides whether a piece is cold. A held piece is never cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColdRule {
    /// A piece with fewer uses than this is cold.
    pub min_accesses: u64,
    /// A piece that has not been used for this long is cold.
    pub idle: Duration,
    /// A piece that was stored or woken more recently than this is never cold, because it has not had time to
    /// be used.
    pub spare_younger_than: Duration,
}

impl Default for ColdRule {
    /// Returns the default rule: a piece is cold if it has been used fewer than 5 times, or has not been used
    /// for an hour, unless it was stored or woken within the last minute.
    fn default() -> Self {
        Self { min_accesses: 5, idle: Duration::from_secs(3600), spare_younger_than: Duration::from_secs(60) }
    }
}

impl ColdRule {
    /// The rule under which every piece without holders is cold.
    pub const EVERYTHING: Self =
        Self { min_accesses: u64::MAX, idle: Duration::ZERO, spare_younger_than: Duration::ZERO };

    /// Returns whether a piece is cold. `awake` is the time since the piece was stored or woken, and `idle`
    /// the time since its last use.
    pub(super) fn is_cold(&self, awake: Duration, idle: Duration, accesses: u64) -> bool {
        awake >= self.spare_younger_than && (accesses < self.min_accesses || idle >= self.idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cold_is_seldom_or_long_ago_but_never_new() {
        let rule = ColdRule::default();
        let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
        assert!(!rule.is_cold(minute / 2, minute / 2, 0), "just made");
        assert!(rule.is_cold(minute, Duration::ZERO, 4), "seldom used");
        assert!(!rule.is_cold(minute, Duration::ZERO, 5));
        assert!(!rule.is_cold(2 * hour, 59 * minute, 100));
        assert!(rule.is_cold(2 * hour, hour, 100), "not used for an hour");
        assert!(ColdRule::EVERYTHING.is_cold(Duration::ZERO, Duration::ZERO, 1 << 40));
    }
}
