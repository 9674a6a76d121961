//! Means with confidence intervals.

use serde::Serialize;

/// A mean over a few independent repetitions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Half the width of the 95 % confidence interval (Student's t); `None` for fewer than two repetitions.
    pub half_width: Option<f64>,
}

/// The 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom. Beyond them the normal quantile is
/// used.
const T: [f64; 15] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
];
const NORMAL: f64 = 1.960;

impl Estimate {
    /// Estimates the mean of these repetitions. The mean of no repetition is 0.
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
            T.get(repetitions.len() - 2).copied().unwrap_or(NORMAL) * (variance / n).sqrt()
        });
        Self { mean, half_width }
    }
}
