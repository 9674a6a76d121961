//! The times that a slab's loads and writes took, until Python takes them.

use std::collections::VecDeque;
use std::time::Duration;

use kvtier::SlabStep;
use parking_lot::Mutex;

/// The number of times of each kind that are kept. The oldest ones leave.
const MOST: usize = 10_000;

/// Times in seconds, by what took them.
#[derive(Default)]
pub(crate) struct SlabTimes {
    loads: Mutex<VecDeque<f64>>,
    writes: Mutex<VecDeque<f64>>,
}

impl SlabTimes {
    /// Adds the time of a step.
    pub(crate) fn add(&self, step: SlabStep, time: Duration) {
        let times = match step {
            SlabStep::Load => &self.loads,
            SlabStep::Write => &self.writes,
        };
        let mut times = times.lock();
        if times.len() == MOST {
            times.pop_front();
        }
        times.push_back(time.as_secs_f64());
    }

    /// Returns all times in their order, by the names that Python uses, and keeps none of them.
    pub(crate) fn take(&self) -> [(&'static str, Vec<f64>); 2] {
        [("load_seconds", &self.loads), ("write_seconds", &self.writes)]
            .map(|(name, times)| (name, std::mem::take(&mut *times.lock()).into()))
    }
}
