//! The time that a prompt waits for its records: hardly longer than computing takes, however the disk behaves.

use std::time::Duration;

/// The part of the time to compute everything that a request may lose by waiting for a disk.
pub(super) const MOST_LOST: f64 = 0.05;

/// A record that the disk has not delivered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Awaited {
    /// The time to compute it.
    pub(super) cost: Duration,
    /// The number of its bytes.
    pub(super) bytes: usize,
    /// The part that the disk has read.
    pub(super) progress: f64,
}

impl Awaited {
    fn bytes_left(&self) -> f64 {
        self.bytes as f64 * (1.0 - self.progress)
    }
}

// Decision: docs/decisions/tiers.md#a-request-stops-waiting-when-giving-up-costs-a-twentieth
/// Returns whether a prompt that has `waited` should stop waiting for records, given in the order in which it needs
/// them. `cost` is the time to compute everything that it has waited for, and `bytes` the number of bytes.
pub(super) fn gives_up(waited: Duration, cost: Duration, bytes: usize, awaited: &[Awaited]) -> bool {
    let (waited, cost) = (waited.as_secs_f64(), cost.as_secs_f64());
    let may_lose = MOST_LOST * cost;
    // If the prompt stopped waiting now, it would compute what is left.
    let left: f64 = awaited.iter().map(|one| one.cost.as_secs_f64() * (1.0 - one.progress)).sum();
    // What has been read of a record is lost, so a disk that is too slow is given up as soon as that is known. A disk that
    // becomes slower later may cost as much again.
    waited >= may_lose && !pays(waited, bytes, awaited) || waited + left >= cost + 2.0 * may_lose
}

/// Returns whether the disk, as fast as it was so far, reads the next records before they would be computed.
fn pays(waited: f64, bytes: usize, awaited: &[Awaited]) -> bool {
    let read = bytes as f64 - awaited.iter().map(Awaited::bytes_left).sum::<f64>();
    let (mut took, mut cost) = (0.0, 0.0);
    read > 0.0
        && awaited.iter().any(|one| {
            took += one.bytes_left() * waited / read;
            cost += one.cost.as_secs_f64();
            took < cost
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Waits for records on a disk that reads one after another at a constant speed. Returns the time until the prompt
    /// is there, in parts of the time to compute everything, and the number of records that have arrived.
    fn wait(records: &[(f64, usize)], bytes_per_second: f64) -> (f64, usize) {
        let cost: f64 = records.iter().map(|(seconds, _)| seconds).sum();
        let bytes: usize = records.iter().map(|(_, bytes)| bytes).sum();
        let mut waited = 0.0;
        loop {
            let mut read = bytes_per_second * waited;
            let mut awaited = Vec::new();
            for &(seconds, bytes) in records {
                let progress = (read / bytes as f64).min(1.0);
                read -= progress * bytes as f64;
                if progress < 1.0 {
                    awaited.push(Awaited { cost: Duration::from_secs_f64(seconds), bytes, progress });
                }
            }
            let seconds = Duration::from_secs_f64;
            if awaited.is_empty() || gives_up(seconds(waited), seconds(cost), bytes, &awaited) {
                let left: f64 = awaited.iter().map(|one| one.cost.as_secs_f64()).sum();
                return ((waited + left) / cost, records.len() - awaited.len());
            }
            waited += cost / 1000.0;
        }
    }

    #[test]
    fn a_disk_that_is_faster_is_waited_for_although_its_first_record_is_late() {
        // Five documents take a second each, and the disk needs 0.6 seconds for each.
        let (took, arrived) = wait(&[(1.0, 600); 5], 1000.0);
        assert_eq!(arrived, 5);
        assert!(took < 0.61, "{took}");
        let (took, arrived) = wait(&[(1.0, 600); 5], 100.0);
        assert_eq!(arrived, 0);
        assert!(took < 1.06, "{took}");
        // A disk that has read nothing.
        let (took, arrived) = wait(&[(1.0, 600); 5], 0.0);
        assert_eq!(arrived, 0);
        assert!(took < 1.06, "{took}");
    }

    proptest! {
        #[test]
        fn a_request_loses_a_twentieth_whatever_the_speed_of_the_disk(
            // Times to compute a byte differ by a tenth.
            records in prop::collection::vec((0.9f64..1.1, 1_000usize..1_000_000), 1..20),
            speed in prop_oneof![0.01f64..20.0, 0.5..1.2],
        ) {
            let records: Vec<_> = records.iter().map(|&(each, bytes)| (each * bytes as f64 / 1e5, bytes)).collect();
            let cost: f64 = records.iter().map(|(seconds, _)| seconds).sum();
            let bytes: usize = records.iter().map(|(_, bytes)| bytes).sum();
            let (took, arrived) = wait(&records, speed * bytes as f64 / cost);
            prop_assert!(took <= 1.055, "{took}");
            prop_assert!(speed < 1.2 || arrived == records.len(), "{arrived}");
        }
    }
}
