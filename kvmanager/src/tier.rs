//! Thresholds for offloading from a tier and for loading ahead: decisions without effects.

use crate::error::too_large;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// A tier of memory that can offload blocks to the tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The device's memory, above the host's.
    Device,
    /// The host's memory, pinned or not, above disks.
    Host,
}

/// A decision about the blocks of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TierAction {
    /// Move no blocks.
    None,
    /// Move this many blocks one tier down: the fewest after which the threshold holds.
    Offload {
        /// Number of blocks.
        blocks: usize,
    },
    /// Load this many blocks from the tier below, before they are requested.
    Prefetch {
        /// Number of blocks.
        blocks: usize,
    },
}

/// The thresholds for moving blocks between tiers, as shares between 0 and 1. The code that moves blocks
/// asks for a decision; the thresholds move nothing themselves.
///
/// ```
/// use kvmanager::{Tier, TierAction, TierThresholds};
/// let thresholds = TierThresholds::default();                        // 0.85, 0.90, 0.70
/// assert_eq!(thresholds.on_pressure(Tier::Device, 85, 100)?, TierAction::None);
/// assert_eq!(thresholds.on_pressure(Tier::Device, 93, 100)?, TierAction::Offload { blocks: 8 });
/// // a hot prefix of 20 blocks: only as many as do not make the device offload at once
/// assert_eq!(thresholds.on_access(0.8, 20, 75, 100)?, TierAction::Prefetch { blocks: 10 });
/// assert_eq!(thresholds.on_access(0.6, 20, 75, 100)?, TierAction::None);
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fractions", into = "Fractions")]
pub struct TierThresholds(Fractions);

/// The thresholds as stored. Omitted fields have their default.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Fractions {
    device_offload: f64,
    host_offload: f64,
    prefetch: f64,
}

impl Default for Fractions {
    fn default() -> Self {
        Self { device_offload: 0.85, host_offload: 0.90, prefetch: 0.70 }
    }
}

impl Default for TierThresholds {
    /// Returns the numbers of seed 003: the device offloads when more than 85 % of its blocks are in use,
    /// the host above 90 %, and blocks hotter than 0.7 are loaded ahead.
    fn default() -> Self {
        Self(Fractions::default())
    }
}

impl TryFrom<Fractions> for TierThresholds {
    type Error = Error;

    fn try_from(fractions: Fractions) -> Result<Self> {
        fraction("device_offload", fractions.device_offload)?;
        fraction("host_offload", fractions.host_offload)?;
        fraction("prefetch", fractions.prefetch)?;
        Ok(Self(fractions))
    }
}

impl From<TierThresholds> for Fractions {
    fn from(thresholds: TierThresholds) -> Self {
        thresholds.0
    }
}

impl TierThresholds {
    /// Creates thresholds for offloading from the device, for offloading from the host, and for loading
    /// ahead.
    ///
    /// # Errors
    /// Returns [`Error::NotAFraction`] if a threshold is below 0, above 1 or NaN.
    pub fn new(device_offload: f64, host_offload: f64, prefetch: f64) -> Result<Self> {
        Fractions { device_offload, host_offload, prefetch }.try_into()
    }

    /// Returns the share of blocks in use above which a tier offloads.
    pub fn offload(&self, tier: Tier) -> f64 {
        match tier {
            Tier::Device => self.0.device_offload,
            Tier::Host => self.0.host_offload,
        }
    }

    /// Returns the heat above which blocks are loaded ahead.
    pub fn prefetch(&self) -> f64 {
        self.0.prefetch
    }

    /// Decides about a tier with `used` of `total` blocks in use.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::TooLarge`] if `used` exceeds `total`.
    pub fn on_pressure(&self, tier: Tier, used: usize, total: usize) -> Result<TierAction> {
        Ok(match used.saturating_sub(self.room(tier, used, total)?) {
            0 => TierAction::None,
            blocks => TierAction::Offload { blocks },
        })
    }

    /// Decides whether to load `wanted` blocks of the given heat (0 to 1, measured by the caller) to a
    /// device with `used` of `total` blocks in use. Never loads so many blocks that the device would
    /// offload.
    ///
    /// # Errors
    /// Returns [`Error::NotAFraction`] if `heat` is not between 0 and 1, and [`kvcore::Error::TooLarge`] if
    /// `used` exceeds `total`.
    pub fn on_access(&self, heat: f64, wanted: usize, used: usize, total: usize) -> Result<TierAction> {
        fraction("heat", heat)?;
        let room = self.room(Tier::Device, used, total)?.saturating_sub(used);
        Ok(match wanted.min(room) {
            blocks if blocks > 0 && heat > self.0.prefetch => TierAction::Prefetch { blocks },
            _ => TierAction::None,
        })
    }

    /// Returns the largest number of blocks that a tier may have in use: the largest `n` with
    /// `n / total <= threshold`.
    fn room(&self, tier: Tier, used: usize, total: usize) -> Result<usize> {
        if used > total {
            return Err(too_large("blocks in use", used, total));
        }
        let threshold = self.offload(tier);
        let near = (threshold * total as f64) as usize;
        // The product is rounded. The quotient, which other code computes as well, decides.
        let fits = |n: &usize| *n <= total && *n as f64 / total as f64 <= threshold;
        Ok([near + 1, near].into_iter().find(fits).unwrap_or(near.saturating_sub(1)))
    }
}

/// Checks that a number is between 0 and 1.
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
                    match thresholds.on_pressure(Tier::Host, used, total).unwrap() {
                        TierAction::None => assert!(share(used) <= limit, "{used} of {total} at {limit}"),
                        TierAction::Offload { blocks } => {
                            assert!(share(used - blocks) <= limit, "{used} of {total} at {limit}: too few");
                            assert!(
                                share(used - blocks + 1) > limit,
                                "{used} of {total} at {limit}: too many"
                            );
                        }
                        TierAction::Prefetch { .. } => panic!("pressure loads nothing"),
                    }
                }
            }
        }
    }

    #[test]
    fn a_threshold_just_below_a_share_is_below_it() {
        for (used, total) in (1..200usize).flat_map(|total| (1..=total).map(move |used| (used, total))) {
            let share = used as f64 / total as f64;
            let at = |limit| TierThresholds::new(limit, limit, limit)?.on_pressure(Tier::Device, used, total);
            assert_eq!(at(share), Ok(TierAction::None), "{used} of {total}");
            assert_eq!(at(share.next_down()), Ok(TierAction::Offload { blocks: 1 }), "{used} of {total}");
        }
    }

    #[test]
    fn prefetching_never_makes_the_device_offload() {
        let thresholds = TierThresholds::default();
        for used in 0..=100 {
            for wanted in [0, 1, 20, usize::MAX] {
                match thresholds.on_access(0.71, wanted, used, 100).unwrap() {
                    TierAction::Prefetch { blocks } => {
                        assert!(blocks <= wanted);
                        let after = thresholds.on_pressure(Tier::Device, used + blocks, 100);
                        assert_eq!(after, Ok(TierAction::None));
                    }
                    action => assert!(action == TierAction::None && (wanted == 0 || used >= 85)),
                }
            }
        }
        assert_eq!(thresholds.on_access(0.7, 5, 0, 100), Ok(TierAction::None), "hot is more than warm");
    }

    #[test]
    fn what_is_no_share_is_refused() {
        for bad in [-0.1, 1.000_001, f64::INFINITY, f64::NAN] {
            for (what, thresholds) in [
                ("device_offload", TierThresholds::new(bad, 0.9, 0.7)),
                ("host_offload", TierThresholds::new(0.9, bad, 0.7)),
                ("prefetch", TierThresholds::new(0.9, 0.9, bad)),
                (
                    "heat",
                    TierThresholds::default().on_access(bad, 1, 1, 2).map(|_| TierThresholds::default()),
                ),
            ] {
                let error = thresholds.unwrap_err();
                assert!(matches!(error, Error::NotAFraction { what: got, .. } if got == what), "{error}");
            }
        }
        let thresholds = TierThresholds::default();
        let more = Err(Error::Core(CoreError::TooLarge { what: "blocks in use", value: 3, most: 2 }));
        assert_eq!(thresholds.on_pressure(Tier::Device, 3, 2), more);
        assert_eq!(thresholds.on_access(0.9, 1, 3, 2), more);
    }

    #[test]
    fn thresholds_are_stored_read_back_and_checked() {
        let json = r#"{"device_offload":0.5,"host_offload":0.9,"prefetch":0.7}"#;
        let read: TierThresholds = serde_json::from_str(json).unwrap();
        assert_eq!((read.offload(Tier::Device), read.offload(Tier::Host), read.prefetch()), (0.5, 0.9, 0.7));
        assert_eq!(serde_json::to_string(&read).unwrap(), json);
        assert_eq!(serde_json::from_str::<TierThresholds>("{}").unwrap(), TierThresholds::default());
        for wrong in [r#"{"prefetch":1.5}"#, r#"{"gpu_offload":0.5}"#] {
            assert!(serde_json::from_str::<TierThresholds>(wrong).is_err(), "{wrong}");
        }
    }
}
