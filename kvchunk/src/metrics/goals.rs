//! Goals and their measured values, as data structures.

use std::fmt;

use serde::Serialize;

/// The exclusive bound of a goal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The measured value must be greater than this value.
    Above(f64),
    /// The measured value must be less than this value.
    Below(f64),
}

/// A goal and its measured value.
///
/// ```
/// use kvchunk::metrics::{Goal, Target};
/// let goal = Goal::new("allocation_latency_p99", "seconds", Target::Below(1e-3), Some(0.004));
/// assert_eq!(goal.met, Some(false));
/// assert_eq!(goal.to_string(), "allocation_latency_p99: 0.004 seconds, goal < 0.001: missed");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Goal {
    /// Name of the quantity.
    pub name: &'static str,
    /// Unit of the quantity.
    pub unit: &'static str,
    /// Target value.
    pub target: Target,
    /// Measured value, or `None` if nothing was measured.
    pub measured: Option<f64>,
    /// `Some(true)` if the measured value meets the target, and `None` if nothing was measured.
    pub met: Option<bool>,
}

impl Goal {
    /// Creates a goal, and compares its measured value, if there is one, with the target.
    pub fn new(name: &'static str, unit: &'static str, target: Target, measured: Option<f64>) -> Self {
        let met = measured.map(|value| match target {
            Target::Above(limit) => value > limit,
            Target::Below(limit) => value < limit,
        });
        Self { name, unit, target, measured, met }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.measured {
            Some(measured) => write!(f, "{}: {measured} {}", self.name, self.unit)?,
            None => write!(f, "{}: not measured", self.name)?,
        }
        match self.target {
            Target::Above(limit) => write!(f, ", goal > {limit}")?,
            Target::Below(limit) => write!(f, ", goal < {limit}")?,
        }
        f.write_str(match self.met {
            Some(true) => ": met",
            Some(false) => ": missed",
            None => "",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_outside_its_goal_and_nothing_measured_is_neither() {
        let met = |target, measured| Goal::new("x", "u", target, measured).met;
        assert_eq!(met(Target::Above(0.1), Some(0.1)), Some(false));
        assert_eq!(met(Target::Above(0.1), Some(0.11)), Some(true));
        assert_eq!(met(Target::Below(0.1), Some(0.1)), Some(false));
        assert_eq!(met(Target::Below(0.1), Some(0.09)), Some(true));
        assert_eq!(met(Target::Below(0.1), Some(f64::NAN)), Some(false));
        assert_eq!(met(Target::Below(0.1), None), None);
        let unknown = Goal::new("x", "seconds", Target::Above(0.5), None);
        assert_eq!(unknown.to_string(), "x: not measured, goal > 0.5");
    }
}
