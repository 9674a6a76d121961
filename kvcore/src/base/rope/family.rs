//! The rotary embeddings of a model's layers. Layers with equal specifications share one embedding.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Regime, Rope, RopeConfig};
use crate::base::{Error, Result};

// Decision: docs/decisions/base.md#the-tables-of-four-regimes-are-kept
/// Maximum number of regimes per specification whose tables are kept. Dynamic NTK has one regime per length;
/// a regime that is no longer kept is recomputed.
const KEPT: usize = 4;

/// The rotary embeddings of a model's layers, in every regime.
///
/// ```
/// use kvcore::{RopeConfig, RopeFamily, RopeScaling};
/// let scaling = RopeScaling::DynamicNtk { factor: 4.0, original_max_position: 16 };
/// let local = RopeConfig::new(8, 10_000.0);
/// let global = RopeConfig { scaling, ..RopeConfig::new(8, 1e6) };
/// let family = RopeFamily::new(&[local.clone(), global.clone(), local], 64)?;
/// let (short, long) = (family.at(16)?, family.at(40)?);
/// assert_eq!(short.layers()[0].frequencies(), long.layers()[0].frequencies());
/// assert_ne!(short.layers()[1].frequencies(), long.layers()[1].frequencies());
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct RopeFamily {
    kinds: Vec<Kind>,
    /// For each layer, its index in `kinds`.
    layers: Vec<usize>,
    max_positions: usize,
}

/// A specification and its recently used regimes, with the most recent one last.
#[derive(Debug)]
struct Kind {
    config: RopeConfig,
    recent: Mutex<Vec<(Regime, Arc<Rope>)>>,
}

/// The embeddings of all layers in a request's regime. Cheap to clone.
#[derive(Debug, Clone)]
pub struct LayerRopes(Arc<[Arc<Rope>]>);

impl LayerRopes {
    /// Returns the embeddings, one per layer.
    pub fn layers(&self) -> &[Arc<Rope>] {
        &self.0
    }
}

impl RopeFamily {
    /// Creates the embeddings of `layers` for positions `0..max_positions`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidRope`] for an invalid specification, and [`Error::Zero`] if there are no
    /// layers or no positions.
    pub fn new(layers: &[RopeConfig], max_positions: usize) -> Result<Self> {
        for (what, count) in [("layers", layers.len()), ("max_positions", max_positions)] {
            if count == 0 {
                return Err(Error::Zero { what });
            }
        }
        let mut family = Self { kinds: Vec::new(), layers: Vec::new(), max_positions };
        for config in layers {
            let known = family.kinds.iter().position(|kind| kind.config == *config);
            family.layers.push(known.unwrap_or(family.kinds.len()));
            if known.is_none() {
                config.frequencies_for(config.regime(max_positions))?;
                family.kinds.push(Kind { config: config.clone(), recent: Mutex::new(Vec::new()) });
            }
        }
        Ok(family)
    }

    /// Returns the maximum number of positions per request.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Returns the embeddings for a request whose positions are all below `longest`; see [`Regime`].
    ///
    /// # Errors
    /// Returns [`Error::TooLarge`] if `longest` exceeds [`max_positions`](Self::max_positions).
    pub fn at(&self, longest: usize) -> Result<LayerRopes> {
        if longest > self.max_positions {
            return Err(Error::too_large("positions of a request", longest, self.max_positions));
        }
        let ropes = self.kinds.iter().map(|kind| kind.at(longest, self.max_positions));
        let ropes = ropes.collect::<Result<Vec<_>>>()?;
        Ok(LayerRopes(self.layers.iter().map(|&kind| Arc::clone(&ropes[kind])).collect()))
    }
}

impl Kind {
    fn at(&self, longest: usize, max_positions: usize) -> Result<Arc<Rope>> {
        let regime = self.config.regime(longest);
        let mut recent = self.recent.lock();
        let known = recent.iter().position(|(known, _)| *known == regime);
        let rope = match known {
            Some(at) => recent.remove(at).1,
            None => Arc::new(Rope::in_regime(self.config.clone(), regime, max_positions)?),
        };
        recent.push((regime, Arc::clone(&rope)));
        if recent.len() > KEPT {
            recent.remove(0);
        }
        Ok(rope)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::RopeScaling;

    fn dynamic(theta: f64) -> RopeConfig {
        let scaling = RopeScaling::DynamicNtk { factor: 4.0, original_max_position: 16 };
        RopeConfig { scaling, ..RopeConfig::new(8, theta) }
    }

    #[test]
    fn a_regime_is_made_once_and_shared_by_layers_and_requests() {
        let family = RopeFamily::new(&[dynamic(10_000.0), dynamic(500.0), dynamic(10_000.0)], 64).unwrap();
        let (first, again, other) = (family.at(20).unwrap(), family.at(20).unwrap(), family.at(21).unwrap());
        assert!(Arc::ptr_eq(&first.layers()[0], &first.layers()[2]));
        assert!(!Arc::ptr_eq(&first.layers()[0], &first.layers()[1]));
        assert!(Arc::ptr_eq(&first.layers()[1], &again.layers()[1]));
        assert_ne!(first.layers()[1].frequencies(), other.layers()[1].frequencies());
        assert!(Arc::ptr_eq(&family.at(1).unwrap().layers()[0], &family.at(16).unwrap().layers()[0]));
    }

    #[test]
    fn the_regimes_used_last_are_kept() {
        let family = RopeFamily::new(&[dynamic(10_000.0)], 64).unwrap();
        let first = family.at(20).unwrap();
        for longest in 21..20 + KEPT {
            family.at(longest).unwrap();
        }
        assert!(Arc::ptr_eq(&first.layers()[0], &family.at(20).unwrap().layers()[0]));
        for longest in 30..30 + KEPT {
            family.at(longest).unwrap();
        }
        let again = family.at(20).unwrap();
        assert!(!Arc::ptr_eq(&first.layers()[0], &again.layers()[0]));
        assert_eq!(first.layers()[0].frequencies(), again.layers()[0].frequencies());
    }

    #[test]
    fn rule_6_dynamic_ntk_goes_on_to_its_factor_and_no_further() {
        let config = dynamic(10_000.0);
        assert_eq!(config.max_positions(16), 64);
        assert_eq!(RopeConfig::new(8, 10_000.0).max_positions(16), 16);
        let family = RopeFamily::new(&[config], 64).unwrap();
        assert!(family.at(64).is_ok());
        assert!(matches!(family.at(65), Err(Error::TooLarge { value: 65, most: 64, .. })));
    }
}
