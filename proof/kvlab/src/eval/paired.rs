//! Paired comparisons: the same questions, answered with two strategies.

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// Counts of the questions that full attention and another strategy both answered.
///
/// ```
/// use kvlab::Paired;
/// // 400 questions: the other strategy lost 12 right answers, and found 6 that full attention missed.
/// let paired = Paired { asked: 400, lost: 12, gained: 6 };
/// assert_eq!(paired.loss(), 0.015);
/// assert!(paired.at_most() > 0.03 && paired.at_least() < 0.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paired {
    /// The number of questions.
    pub asked: usize,
    /// The number of questions that only full attention answered correctly.
    pub lost: usize,
    /// The number of questions that only the other strategy answered correctly.
    pub gained: usize,
}

/// The 95 % quantile of the normal distribution.
const Z: f64 = 1.645;

/// Serialises the counts, the loss and its bounds.
impl Serialize for Paired {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut fields = to.serialize_struct("Paired", 6)?;
        for (name, count) in [("asked", self.asked), ("lost", self.lost), ("gained", self.gained)] {
            fields.serialize_field(name, &count)?;
        }
        for (name, share) in
            [("loss", self.loss()), ("at_least", self.at_least()), ("at_most", self.at_most())]
        {
            fields.serialize_field(name, &share)?;
        }
        fields.end()
    }
}

impl Paired {
    /// Counts pairs of grades. In each pair, full attention's grade comes first.
    pub fn of(pairs: impl IntoIterator<Item = (bool, bool)>) -> Self {
        pairs.into_iter().fold(Self::default(), |sum, (full, other)| Self {
            asked: sum.asked + 1,
            lost: sum.lost + usize::from(full && !other),
            gained: sum.gained + usize::from(other && !full),
        })
    }

    /// Returns the share of all questions that the other strategy loses. It is negative if that strategy is
    /// better.
    pub fn loss(&self) -> f64 {
        (self.lost as f64 - self.gained as f64) / self.asked.max(1) as f64
    }

    /// Returns the largest loss that the data do not refute: the upper limit of a one-sided 95 % interval
    /// (Tango, 1998). Returns 1 if there are no questions.
    pub fn at_most(&self) -> f64 {
        self.limit(self.loss(), 1.0)
    }

    /// Returns the smallest loss that the data do not refute: the lower limit of a one-sided 95 % interval.
    /// Returns −1 if there are no questions.
    pub fn at_least(&self) -> f64 {
        self.limit(self.loss(), -1.0)
    }

    /// Formats the loss in percentage points, with the smallest and the largest loss that the data do not
    /// refute in brackets.
    pub fn points(&self) -> String {
        let [loss, least, most] = [self.loss(), self.at_least(), self.at_most()].map(|share| 100.0 * share);
        format!("{loss:.1} ({least:.1} to {most:.1})")
    }

    /// Returns the approximate number of questions needed to bound the loss by `within` if questions are lost
    /// and gained at the current rates. Returns `asked` if the loss is already bounded, and `None` if the
    /// search passes a million questions without bounding it.
    pub fn needed(&self, within: f64) -> Option<usize> {
        if self.at_most() <= within {
            return Some(self.asked);
        }
        let scaled = |times: f64| {
            let count = |n: usize| (n as f64 * times).round() as usize;
            Self { asked: count(self.asked.max(1)), lost: count(self.lost), gained: count(self.gained) }
        };
        // Doubling finds the size within a factor of two. Bisection then narrows it down.
        let (mut low, mut high) = (1.0, 2.0);
        while scaled(high).at_most() > within {
            (low, high) = (high, 2.0 * high);
            if scaled(high).asked > 1_000_000 {
                return None;
            }
        }
        for _ in 0..20 {
            let middle = f64::midpoint(low, high);
            if scaled(middle).at_most() > within { low = middle } else { high = middle }
        }
        Some(scaled(high).asked)
    }

    /// Returns the loss between `from` and `end` at which the score statistic reaches the quantile.
    fn limit(&self, from: f64, end: f64) -> f64 {
        if self.asked == 0 {
            return end;
        }
        let (mut inside, mut outside) = (from, end);
        for _ in 0..60 {
            let middle = f64::midpoint(inside, outside);
            if self.score(middle).abs() <= Z { inside = middle } else { outside = middle }
        }
        inside
    }

    /// Returns the score statistic for a loss `d`: the difference between the observed loss and `d`, in
    /// standard deviations under `d`.
    fn score(&self, d: f64) -> f64 {
        let (n, b, c) = (self.asked as f64, self.lost as f64, self.gained as f64);
        // The maximum-likelihood share of gained answers, given a loss of `d`.
        let linear = -b - c + (2.0 * n - b + c) * d;
        let constant = -c * d * (1.0 - d);
        let gained = ((linear * linear - 8.0 * n * constant).max(0.0).sqrt() - linear) / (4.0 * n);
        let variance = n * (2.0 * gained + d * (1.0 - d));
        let distance = b - c - n * d;
        if distance == 0.0 { 0.0 } else { distance / variance.max(f64::MIN_POSITIVE).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_the_score_test() {
        // If the strategies agree everywhere, the upper limit is z² / (n + z²).
        let none = Paired { asked: 150, lost: 0, gained: 0 };
        assert!((none.at_most() - Z * Z / (150.0 + Z * Z)).abs() < 1e-6, "{}", none.at_most());
        assert!((none.at_least() + none.at_most()).abs() < 1e-9, "both ways are alike");
        // Both limits enclose the loss, and close in on it as the number of questions grows.
        let few = Paired { asked: 100, lost: 20, gained: 10 };
        let many = Paired { asked: 10_000, lost: 2_000, gained: 1_000 };
        assert!(few.at_least() < 0.1 && few.at_most() > 0.1);
        assert!(many.at_most() - many.at_least() < 0.2 * (few.at_most() - few.at_least()));
        // Wald's interval is nearly the same for many questions.
        let wald = Z * ((0.3 - 0.01) / 10_000.0f64).sqrt();
        assert!((many.at_most() - 0.1 - wald).abs() < 1e-4, "{} and {wald}", many.at_most() - 0.1);
        assert_eq!((Paired::default().at_most(), Paired::default().at_least()), (1.0, -1.0));
        assert!(Paired { asked: 5, lost: 5, gained: 0 }.at_most() > 0.999);
    }

    #[test]
    fn the_number_of_questions_bounds_the_loss() {
        let clean = Paired { asked: 50, lost: 0, gained: 0 };
        let needed = clean.needed(0.02).unwrap();
        assert!((130..140).contains(&needed), "{needed}");
        assert!(Paired { asked: needed, ..clean }.at_most() <= 0.02);
        assert_eq!(Paired { asked: 50, lost: 5, gained: 0 }.needed(0.02), None, "it loses more than that");
        assert_eq!(Paired { asked: 400, lost: 1, gained: 2 }.needed(0.02), Some(400));
    }

    #[test]
    fn pairs_are_counted() {
        let pairs = [(true, true), (true, false), (true, false), (false, true), (false, false)];
        assert_eq!(Paired::of(pairs), Paired { asked: 5, lost: 2, gained: 1 });
    }
}
