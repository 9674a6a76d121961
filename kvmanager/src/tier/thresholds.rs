//! Thresholds for offloading blocks and for prefetching them. This module makes decisions, but does not move
//! blocks.

use std::str::FromStr;

use crate::error::too_large;
use crate::{Error, Result};

/// A memory tier that can offload blocks to the tier below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Device memory, which is above host memory.
    Device,
    /// Host memory, pinned or not, which is above disks.
    Host,
}

/// The thresholds for moving blocks between tiers, as fractions between 0 and 1. They determine the number of
/// blocks to move, but do not move them.
///
/// ```
/// use kvmanager::{Tier, TierThresholds};
/// let thresholds = TierThresholds::default();                        // 0.85, 0.90, 0.70
/// assert_eq!(thresholds.blocks_to_offload(Tier::Device, 85, 100)?, 0);
/// assert_eq!(thresholds.blocks_to_offload(Tier::Device, 93, 100)?, 8);
/// // A hot prefix of 20 blocks: no more than the device can take without offloading.
/// assert_eq!(thresholds.blocks_to_prefetch(0.8, 20, 75, 100)?, 10);
/// assert_eq!(thresholds.blocks_to_prefetch(0.6, 20, 75, 100)?, 0);
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierThresholds {
    device_offload: f64,
    host_offload: f64,
    prefetch: f64,
}

impl Default for TierThresholds {
    /// Returns the thresholds for three tiers: device, host and disk. The device offloads blocks to the host
    /// if more than 85 % of its blocks are in use, the host offloads blocks to disks above 90 %, and blocks
    /// with a heat above 0.7 are prefetched.
    fn default() -> Self {
        Self { device_offload: 0.85, host_offload: 0.90, prefetch: 0.70 }
    }
}

impl FromStr for TierThresholds {
    type Err = String;

    /// Reads three numbers, as in `0.85,0.90,0.70`: the thresholds for offloading from the device, for offloading
    /// from the host, and for prefetching.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers: Option<Vec<f64>> = text.split(',').map(|number| number.trim().parse().ok()).collect();
        let Some(&[device, host, prefetch]) = numbers.as_deref() else {
            return Err(format!("{text:?} is not three numbers, as in 0.85,0.90,0.70"));
        };
        Self::new(device, host, prefetch).map_err(|error| error.to_string())
    }
}

impl TierThresholds {
    /// Creates thresholds for offloading from the device, for offloading from the host, and for prefetching.
    ///
    /// # Errors
    /// Returns [`Error::NotAFraction`] if a threshold is below 0, above 1 or NaN.
    pub fn new(device_offload: f64, host_offload: f64, prefetch: f64) -> Result<Self> {
        fraction("device_offload", device_offload)?;
        fraction("host_offload", host_offload)?;
        fraction("prefetch", prefetch)?;
        Ok(Self { device_offload, host_offload, prefetch })
    }

    /// Returns the fraction of blocks in use above which a tier offloads blocks.
    pub fn offload(&self, tier: Tier) -> f64 {
        match tier {
            Tier::Device => self.device_offload,
            Tier::Host => self.host_offload,
        }
    }

    /// Returns the heat above which blocks are prefetched.
    pub fn prefetch(&self) -> f64 {
        self.prefetch
    }

    /// Returns the number of blocks to offload from a tier in which `used` of `total` blocks are in use. This
    /// is the smallest number that brings the tier down to its threshold.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::TooLarge`] if `used` exceeds `total`.
    pub fn blocks_to_offload(&self, tier: Tier, used: usize, total: usize) -> Result<usize> {
        Ok(used.saturating_sub(self.room(tier, used, total)?))
    }

    // Decision: docs/decisions/managers.md#the-prefetch-threshold-is-compared-with-heat
    /// Returns the number of blocks, at most `wanted`, to prefetch to a device in which `used` of `total`
    /// blocks are in use. `heat` is the caller's measure of how often the blocks are accessed, from 0 to 1.
    /// Prefetching the returned number of blocks never makes the device offload.
    ///
    /// # Errors
    /// Returns [`Error::NotAFraction`] if `heat` is not between 0 and 1, and [`kvcore::Error::TooLarge`] if
    /// `used` exceeds `total`.
    pub fn blocks_to_prefetch(&self, heat: f64, wanted: usize, used: usize, total: usize) -> Result<usize> {
        fraction("heat", heat)?;
        let room = self.room(Tier::Device, used, total)?.saturating_sub(used);
        Ok(if heat > self.prefetch { wanted.min(room) } else { 0 })
    }

    /// Returns the maximum number of blocks that a tier may have in use: the largest `n` with
    /// `n / total <= threshold`.
    fn room(&self, tier: Tier, used: usize, total: usize) -> Result<usize> {
        if used > total {
            return Err(too_large("blocks in use", used, total));
        }
        let threshold = self.offload(tier);
        let near = (threshold * total as f64) as usize;
        // The product of `total` and the threshold is rounded, so the decision is based on the quotient,
        // which other code also computes.
        let fits = |n: &usize| *n <= total && *n as f64 / total as f64 <= threshold;
        Ok([near + 1, near].into_iter().find(fits).unwrap_or(near.saturating_sub(1)))
    }
}

/// Checks that a value is between 0 and 1.
fn fraction(what: &'static str, value: f64) -> Result<()> {
    if (0.0..=1.0).contains(&value) { Ok(()) } else { Err(Error::NotAFraction { what, value }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CoreError;

    #[test]
    fn offloads_are_the_fewest_that_help() {
        for hundredths in 0..=100u32 {
            let limit = f64::from(hundredths) / 100.0;
            let thresholds = TierThresholds::new(limit, limit, 0.5).unwrap();
            for total in [0, 1, 3, 7, 100, 1000] {
                for used in 0..=total {
                    let share = |n: usize| if total == 0 { 0.0 } else { n as f64 / total as f64 };
                    let blocks = thresholds.blocks_to_offload(Tier::Host, used, total).unwrap();
                    assert!(blocks <= used && share(used - blocks) <= limit, "{used} of {total} at {limit}");
                    assert!(blocks == 0 || share(used - blocks + 1) > limit, "{blocks} are too many");
                }
            }
        }
    }

    #[test]
    fn a_threshold_just_below_a_share_is_below_it() {
        for (used, total) in (1..200usize).flat_map(|total| (1..=total).map(move |used| (used, total))) {
            let share = used as f64 / total as f64;
            let at = |limit| {
                let thresholds = TierThresholds::new(limit, limit, limit).unwrap();
                thresholds.blocks_to_offload(Tier::Device, used, total)
            };
            assert_eq!(at(share), Ok(0), "{used} of {total}");
            assert_eq!(at(share.next_down()), Ok(1), "{used} of {total}");
        }
    }

    #[test]
    fn thresholds_are_read_from_text() {
        assert_eq!("0.85,0.90, 0.7".parse(), Ok(TierThresholds::default()));
        assert_eq!("0,1,0.5".parse(), Ok(TierThresholds::new(0.0, 1.0, 0.5).unwrap()));
        for bad in ["", "0.85", "0.85,0.9", "0.85,0.9,0.7,0.1", "0.85,0.9,", "0.85;0.9;0.7", "high,0.9,0.7"] {
            assert!(bad.parse::<TierThresholds>().unwrap_err().contains("three numbers"), "{bad}");
        }
        assert!("0.85,1.1,0.7".parse::<TierThresholds>().unwrap_err().contains("host_offload is 1.1"));
    }

    #[test]
    fn prefetching_never_makes_the_device_offload() {
        let thresholds = TierThresholds::default();
        for used in 0..=100 {
            for wanted in [0, 1, 20, usize::MAX] {
                let blocks = thresholds.blocks_to_prefetch(0.71, wanted, used, 100).unwrap();
                assert!(blocks <= wanted && (blocks > 0 || wanted == 0 || used >= 85));
                let after = thresholds.blocks_to_offload(Tier::Device, used + blocks, 100);
                assert!(blocks == 0 || after == Ok(0));
            }
        }
        assert_eq!(thresholds.blocks_to_prefetch(0.7, 5, 0, 100), Ok(0), "hot is more than warm");
    }

    #[test]
    fn numbers_that_are_no_share_are_refused() {
        let thresholds = TierThresholds::default();
        for bad in [-0.1, 1.000_001, f64::INFINITY, f64::NAN] {
            for (what, refused) in [
                ("device_offload", TierThresholds::new(bad, 0.9, 0.7).map(drop)),
                ("host_offload", TierThresholds::new(0.9, bad, 0.7).map(drop)),
                ("prefetch", TierThresholds::new(0.9, 0.9, bad).map(drop)),
                ("heat", thresholds.blocks_to_prefetch(bad, 1, 1, 2).map(drop)),
            ] {
                let error = refused.unwrap_err();
                assert!(matches!(error, Error::NotAFraction { what: got, .. } if got == what), "{error}");
            }
        }
        let more = Err(Error::Core(CoreError::TooLarge { what: "blocks in use", value: 3, most: 2 }));
        assert_eq!(thresholds.blocks_to_offload(Tier::Device, 3, 2), more);
        assert_eq!(thresholds.blocks_to_prefetch(0.9, 1, 3, 2), more);
    }
}
