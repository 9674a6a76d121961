//! Tables of the sines and cosines for each position, computed on demand.

use std::sync::Arc;

use parking_lot::RwLock;

use crate::base::{Error, Pairing, Regime, Result, RopeConfig};

/// The maximum number of positions in a table. The longest contexts of published models have ten million.
const MOST: usize = 1 << 24;

/// A rotary embedding in one regime, with its table of sines and cosines. Create one per distinct
/// specification and regime, and share it; see [`RopeFamily`](crate::base::RopeFamily).
#[derive(Debug)]
pub struct Rope {
    config: RopeConfig,
    regime: Regime,
    frequencies: Vec<f32>,
    max_positions: usize,
    table: RwLock<Arc<RopeTable>>,
}

/// The cosines and sines of positions `0..len`, without the attention factor.
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Returns the cosines of `position`, one per pair, and writes its sines to `sin`. Negative positions
    /// rotate in the opposite direction.
    ///
    /// # Panics
    /// Panics if the table does not contain this position (see [`Rope::table`]), or if `sin` does not have
    /// one element per pair.
    pub fn at(&self, position: i64, sin: &mut [f32]) -> &[f32] {
        let row =
            position.unsigned_abs() as usize * self.half..(position.unsigned_abs() as usize + 1) * self.half;
        sin.copy_from_slice(&self.sin[row.clone()]);
        if position < 0 {
            for s in sin.iter_mut() {
                *s = -*s;
            }
        }
        &self.cos[row]
    }

    /// Returns the number of positions in the table.
    pub fn len(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Returns whether the table is still empty.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    /// Returns all cosines, `[len, rotary_dim / 2]`, for backends that upload the table.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// Returns all sines, `[len, rotary_dim / 2]`.
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }
}

impl Rope {
    /// Creates a rotary embedding for positions `0..max_positions`, in the regime of requests that use all
    /// of them.
    ///
    /// # Errors
    /// Returns [`Error::InvalidRope`] for an invalid specification, and [`Error::Zero`] if `max_positions`
    /// is 0.
    pub fn new(config: RopeConfig, max_positions: usize) -> Result<Self> {
        let regime = config.regime(max_positions);
        Self::in_regime(config, regime, max_positions)
    }

    /// Creates a rotary embedding in `regime`, for the regime's positions below `max_positions`.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), and [`Error::InvalidRope`] if the scaling does not have
    /// `regime`.
    pub fn in_regime(config: RopeConfig, regime: Regime, max_positions: usize) -> Result<Self> {
        if max_positions == 0 {
            return Err(Error::Zero { what: "max_positions" });
        }
        let frequencies = config.frequencies_for(regime)?;
        let max_positions = config.end_of(regime).map_or(max_positions, |end| end.min(max_positions));
        let table = RopeTable { half: frequencies.len(), cos: Vec::new(), sin: Vec::new() };
        Ok(Self { config, regime, frequencies, max_positions, table: RwLock::new(Arc::new(table)) })
    }

    /// Returns the specification.
    pub fn config(&self) -> &RopeConfig {
        &self.config
    }

    /// Returns the regime of the frequencies.
    pub fn regime(&self) -> Regime {
        self.regime
    }

    /// Returns the frequencies in radians per position, one per pair.
    pub fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// Returns the factor applied to cos and sin when a row is first rotated.
    pub fn attention_factor(&self) -> f32 {
        self.config.attention_factor()
    }

    /// Returns the rule that determines which two elements form a pair.
    pub fn pairing(&self) -> Pairing {
        self.config.pairing
    }

    /// Returns the limit for positions and distances. Their magnitudes must be below this limit.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Returns a table that contains every position in `positions`. Grows the table if needed. Positions
    /// never wrap around.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the magnitude of a position is not below
    /// [`max_positions`](Self::max_positions), or not below 16,777,216. A table of so many positions takes
    /// 8 GiB if heads have 128 elements.
    pub fn table(&self, positions: impl IntoIterator<Item = i64>) -> Result<Arc<RopeTable>> {
        let (mut need, limit) = (0usize, self.max_positions.min(MOST));
        for position in positions {
            if position.unsigned_abs() >= limit as u64 {
                return Err(Error::range("position", position, limit));
            }
            need = need.max(position.unsigned_abs() as usize + 1);
        }
        {
            let table = self.table.read();
            if table.len() >= need {
                return Ok(Arc::clone(&table));
            }
        }
        let mut slot = self.table.write();
        if slot.len() < need {
            let len = need.next_power_of_two().clamp(need, self.max_positions.max(need));
            *slot = Arc::new(self.compute(len));
        }
        Ok(Arc::clone(&slot))
    }

    fn compute(&self, len: usize) -> RopeTable {
        let half = self.frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(len * half), Vec::with_capacity(len * half));
        for position in 0..len {
            for &frequency in &self.frequencies {
                let (s, c) = (position as f64 * f64::from(frequency)).sin_cos();
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        RopeTable { half, cos, sin }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{RopeScaling, rotate_row};

    #[test]
    fn rule_6_a_position_past_the_table_grows_it_or_is_an_error() {
        let rope = Rope::new(RopeConfig::new(8, 10_000.0), 1000).unwrap();
        let small = rope.table([3]).unwrap();
        let large = rope.table([999, -5]).unwrap();
        assert!(small.len() < 999 && large.len() == 1000);
        let mut sin = [0.0; 4];
        let cos = large.at(999, &mut sin);
        assert_eq!((cos[0], sin[0]), (999f64.cos() as f32, 999f64.sin() as f32));
        assert_ne!(cos[0], large.at(999 % 4, &mut [0.0; 4])[0]);
        assert!(matches!(rope.table([1000]), Err(Error::OutOfRange { value: 1000, limit: 1000, .. })));
    }

    #[test]
    fn a_table_has_a_limit_of_its_own() {
        for most in [1 << 30, 1 << 40, usize::MAX] {
            let rope = Rope::new(RopeConfig::new(128, 10_000.0), most).unwrap();
            for position in [1 << 24, 1 << 29, -(1 << 29), i64::MAX, i64::MIN] {
                let outcome = rope.table([3, position]);
                assert!(matches!(outcome, Err(Error::OutOfRange { limit: 16_777_216, .. })), "{position}");
            }
            assert_eq!(rope.table([900]).unwrap().len(), 1024);
        }
    }

    #[test]
    fn rule_5_rotation_keeps_length() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            attention_factor: 1.138_629_4,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 64,
            truncate: true,
        };
        let rope = Rope::new(RopeConfig { scaling, ..RopeConfig::new(8, 10_000.0) }, 4096).unwrap();
        let original: Vec<f32> = (0..8).map(|i| (i as f32 * 0.7).sin()).collect();
        let length = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
        let table = rope.table([4000]).unwrap();
        let mut sin = [0.0; 4];
        let mut stored = original.clone();
        let cos = table.at(17, &mut sin);
        rotate_row(&mut stored, cos, &sin, rope.attention_factor(), rope.pairing());
        assert!((length(&stored) / length(&original) - rope.attention_factor()).abs() < 1e-6);
        for delta in [1, 100, 4000, -17] {
            let mut moved = stored.clone();
            let cos = table.at(delta, &mut sin);
            rotate_row(&mut moved, cos, &sin, 1.0, rope.pairing());
            assert!((length(&moved) / length(&stored) - 1.0).abs() < 1e-6, "delta {delta}");
        }
    }

    #[test]
    fn moving_a_key_equals_rotating_it_there() {
        for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
            let rope =
                Rope::new(RopeConfig { rotary_dim: 6, pairing, ..RopeConfig::new(8, 500.0) }, 512).unwrap();
            let table = rope.table([511]).unwrap();
            let original: Vec<f32> = (0..8).map(|i| (i as f32 * 1.3).cos()).collect();
            let turn = |row: &mut Vec<f32>, by: i64| {
                let mut sin = [0.0; 3];
                let cos = table.at(by, &mut sin).to_vec();
                rotate_row(row, &cos, &sin, 1.0, pairing);
            };
            let (mut there, mut moved) = (original.clone(), original.clone());
            turn(&mut there, 40);
            turn(&mut moved, 100);
            turn(&mut moved, -60);
            for (a, b) in there.iter().zip(&moved) {
                assert!((a - b).abs() < 1e-5);
            }
            assert_eq!(there[6..], original[6..], "elements past the rotary dimension");
        }
    }

    #[test]
    fn contradictory_specifications_are_refused() {
        let base = RopeConfig::new(8, 10_000.0);
        let scaled = |scaling| RopeConfig { scaling, ..base.clone() };
        let long = |short: usize, factor| RopeScaling::LongRope {
            short_factor: vec![1.0; short],
            long_factor: vec![factor; 4],
            attention_factor: 1.0,
            original_max_position: 16,
        };
        let dynamic =
            |factor, original_max_position| RopeScaling::DynamicNtk { factor, original_max_position };
        for (config, name) in [
            (RopeConfig::new(7, 10_000.0), "rotary_dim 7"),
            (RopeConfig::new(8, 0.0), "theta 0"),
            (scaled(RopeScaling::Linear { factor: 0.0 }), "factor 0"),
            (scaled(RopeScaling::StaticNtk { factor: f64::NAN }), "factor NaN"),
            (RopeConfig { rotary_dim: 2, ..scaled(RopeScaling::StaticNtk { factor: 2.0 }) }, "rotary_dim 2"),
            (scaled(dynamic(0.5, 16)), "factor 0.5"),
            (scaled(dynamic(2.0, 0)), "original_max_position 0"),
            (scaled(long(3, 1.0)), "short_factor has 3"),
            (scaled(long(4, -1.0)), "long_factor -1"),
        ] {
            let error = Rope::new(config, 100).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
