//! Means with confidence intervals.

use serde::Serialize;

/// A mean over a few independent repetitions, with a confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Half the width of the 95 % confidence interval (Student's t); `None` for fewer than two repetitions.
    pub half_width: Option<f64>,
}

/// The 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom.
const T: [f64; 15] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
];
/// The 97.5 % quantile of the normal distribution.
const NORMAL: f64 = 1.959_964;

/// Returns the 97.5 % quantile of Student's t. Above fifteen degrees of freedom, uses an expansion around the
/// normal quantile (Abramowitz and Stegun, 26.7.5).
fn quantile(degrees: usize) -> f64 {
    T.get(degrees.saturating_sub(1)).copied().unwrap_or_else(|| {
        let (z, n) = (NORMAL, degrees as f64);
        let first = (z.powi(3) + z) / 4.0;
        let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
        z + first / n + second / n.powi(2)
    })
}

/// Returns the upper median, or NaN if there are no values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Estimate {
    /// Estimates the mean of these repetitions. If there are none, the mean is 0.
    ///
    /// ```
    /// use kvlab::Estimate;
    /// let estimate = Estimate::of(&[0.9, 1.0, 0.8, 0.9, 0.9]);
    /// assert!((estimate.mean - 0.9).abs() < 1e-9);
    /// assert!((estimate.half_width.unwrap() - 2.776 * (0.005f64 / 5.0).sqrt()).abs() < 1e-9);
    /// ```
    pub fn of(repetitions: &[f64]) -> Self {
        let n = repetitions.len() as f64;
        let mean = repetitions.iter().sum::<f64>() / n.max(1.0);
        let half_width = (repetitions.len() > 1).then(|| {
            let variance = repetitions.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
            quantile(repetitions.len() - 1) * (variance / n).sqrt()
        });
        Self { mean, half_width }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_equal_published_tables() {
        for (degrees, t) in [(1, 12.706), (4, 2.776), (11, 2.201), (19, 2.093), (59, 2.001), (400, 1.966)] {
            assert!((quantile(degrees) - t).abs() < 2e-3, "{degrees}: {}", quantile(degrees));
        }
    }

    #[test]
    fn the_median_is_a_value() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0])), (2.0, 4.0));
        assert!(median(Vec::new()).is_nan());
    }
}
