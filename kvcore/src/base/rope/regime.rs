//! Regimes, which select a request's frequencies if the scaling depends on the request's length.

use super::{RopeConfig, RopeScaling};

/// The input that, together with a [`RopeConfig`], determines the frequencies.
///
/// A request has one regime for all of its tokens, from its first prefill to its last answer token. The
/// regime depends on the highest position that the request *may* reach: the prompt and the tokens to generate
/// except the last, capped at the model's limit. A request therefore never holds keys of two regimes, and a
/// [`Rope`](crate::Rope) refuses positions past the end of its regime.
///
/// A rotation cannot repair keys of another regime, because the states of deeper layers were computed with
/// different attention. The frequencies are part of every key ([`KeyScope::rope`](crate::KeyScope::rope)), so
/// a lookup under another regime is a miss.
///
/// Hugging Face transformers uses the highest position of each *forward pass* instead. Its frequencies
/// therefore change in the middle of an answer, while older cached keys keep the old ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Regime {
    /// The frequencies within the original context, and the only frequencies of scalings that do not depend
    /// on the length.
    Original,
    /// The frequencies of `LongRoPE` beyond the original context.
    Long,
    /// The frequencies of dynamic NTK for this many positions, which must exceed the original context.
    Length(usize),
}

impl RopeConfig {
    /// Returns the regime of a request whose positions are all below `longest`.
    ///
    /// ```
    /// use kvcore::{Regime, RopeConfig, RopeScaling};
    /// let scaling = RopeScaling::DynamicNtk { factor: 4.0, original_max_position: 2048 };
    /// let rope = RopeConfig { scaling, ..RopeConfig::new(64, 10_000.0) };
    /// assert_eq!(rope.regime(2048), Regime::Original);
    /// assert_eq!(rope.regime(3000), Regime::Length(3000)); // theta grows with every position
    /// ```
    pub fn regime(&self, longest: usize) -> Regime {
        match self.scaling {
            RopeScaling::DynamicNtk { original_max_position, .. } if longest > original_max_position => {
                Regime::Length(longest)
            }
            RopeScaling::LongRope { original_max_position, .. } if longest > original_max_position => {
                Regime::Long
            }
            _ => Regime::Original,
        }
    }

    /// Returns the first position that a request in `regime` cannot use, or `None` if the regime has no limit
    /// of its own.
    pub(super) fn end_of(&self, regime: Regime) -> Option<usize> {
        match (regime, &self.scaling) {
            (Regime::Length(n), _) => Some(n),
            (
                Regime::Original,
                RopeScaling::DynamicNtk { original_max_position, .. }
                | RopeScaling::LongRope { original_max_position, .. },
            ) => Some(*original_max_position),
            _ => None,
        }
    }

    /// Returns whether a request with this embedding can be in `regime`.
    pub(super) fn has(&self, regime: Regime) -> bool {
        match regime {
            Regime::Original => true,
            Regime::Long => matches!(self.scaling, RopeScaling::LongRope { .. }),
            Regime::Length(n) => self.regime(n) == regime,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Error, Rope};

    fn dynamic() -> RopeConfig {
        let scaling = RopeScaling::DynamicNtk { factor: 2.0, original_max_position: 16 };
        RopeConfig { scaling, ..RopeConfig::new(8, 10_000.0) }
    }

    fn long() -> RopeConfig {
        let scaling = RopeScaling::LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![1.0, 2.0, 3.0, 4.0],
            attention_factor: 1.2,
            original_max_position: 16,
        };
        RopeConfig { scaling, ..RopeConfig::new(8, 10_000.0) }
    }

    #[test]
    fn a_regime_begins_past_the_original_context() {
        assert_eq!(
            [16, 17, 18].map(|n| dynamic().regime(n)),
            [Regime::Original, Regime::Length(17), Regime::Length(18)]
        );
        assert_eq!([16, 17, 18].map(|n| long().regime(n)), [Regime::Original, Regime::Long, Regime::Long]);
        assert_eq!(RopeConfig::new(8, 10_000.0).regime(1 << 20), Regime::Original);
    }

    #[test]
    fn regimes_have_their_own_frequencies() {
        let trained = RopeConfig::new(8, 10_000.0).frequencies_for(Regime::Original).unwrap();
        assert_eq!(dynamic().frequencies_for(Regime::Original).unwrap(), trained);
        let stretched = dynamic().frequencies_for(Regime::Length(32)).unwrap();
        // With n / original = 2 and factor 2, the stretch is 3, so the lowest frequency is divided by 3.
        assert_eq!(stretched[0], trained[0]);
        assert!((stretched[3] * 3.0 / trained[3] - 1.0).abs() < 1e-5, "{stretched:?}");
        let divided: Vec<f32> = trained.iter().zip([1.0, 2.0, 3.0, 4.0]).map(|(f, d)| f / d).collect();
        for (f, expected) in long().frequencies_for(Regime::Long).unwrap().iter().zip(divided) {
            assert!((f / expected - 1.0).abs() < 1e-6);
        }
        assert_eq!(long().frequencies_for(Regime::Original).unwrap(), trained);
    }

    #[test]
    fn rule_6_a_position_past_its_regime_is_an_error() {
        for (config, longest, end) in
            [(dynamic(), 10, 16), (dynamic(), 20, 20), (long(), 10, 16), (long(), 20, 32)]
        {
            let regime = config.regime(longest);
            let rope = Rope::in_regime(config, regime, 32).unwrap();
            assert!(rope.table([end - 1, 1 - end]).is_ok(), "{regime:?}");
            let error = rope.table([end]).unwrap_err();
            assert!(matches!(error, Error::OutOfRange { limit, .. } if limit == i128::from(end)), "{error}");
        }
    }

    #[test]
    fn a_regime_of_another_scaling_is_refused() {
        for (config, regime) in [
            (dynamic(), Regime::Long),
            (dynamic(), Regime::Length(16)),
            (long(), Regime::Length(17)),
            (RopeConfig::new(8, 10_000.0), Regime::Long),
        ] {
            let error = config.frequencies_for(regime).unwrap_err().to_string();
            assert!(error.contains("regime"), "{error}");
        }
    }
}
