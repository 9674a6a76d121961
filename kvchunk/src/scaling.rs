//! Context scaling: the temperature and scale of the question's attention to chunks.

use std::sync::Arc;

use kvcore::{MergeGroup, Segment};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The temperature and scale of the question's attention to chunks, after APE (Yang et al., *APE: Faster and
/// Longer Context-Augmented Generation via Adaptive Parallel Encoding*, 2025).
///
/// Chunks that were computed separately get more of the question's attention than chunks that were computed
/// one after another, because each separate chunk has its own first tokens. A temperature below 1 sharpens
/// the logits of the chunks. The scale multiplies the log-sum-exp of all chunks together, before it is merged
/// with the log-sum-exp of the other tokens. Neither factor costs additional time, because segments are
/// merged by their log-sum-exps anyway. The system prompt and the question's own tokens (APE's shared prefix
/// and query) are not changed.
///
/// ```
/// use kvchunk::ContextScaling;
/// assert!(ContextScaling::default().is_plain());
/// assert!(ContextScaling { temperature: 0.9, scale: 0.9 }.check().is_ok());
/// assert!(ContextScaling { temperature: 0.0, scale: 1.0 }.check().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ContextScaling {
    /// The divisor of chunk tokens' logits. 1 means plain attention.
    pub temperature: f32,
    /// The factor on the log-sum-exp of all chunk tokens. 1 means plain attention.
    pub scale: f32,
}

impl Default for ContextScaling {
    fn default() -> Self {
        Self { temperature: 1.0, scale: 1.0 }
    }
}

impl ContextScaling {
    /// Returns whether this is plain attention, with temperature and scale both 1.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Checks that temperature and scale are positive and finite.
    ///
    /// # Errors
    /// Returns [`Error::NotPositive`] if one of them is not.
    pub fn check(&self) -> Result<()> {
        for (what, value) in [("context temperature", self.temperature), ("context scale", self.scale)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::NotPositive { what, value });
            }
        }
        Ok(())
    }

    /// Returns the merge groups that [`apply`](Self::apply) refers to: group 0 for the system prompt and the
    /// question, group 1 for the chunks.
    pub fn groups(&self) -> Arc<[MergeGroup]> {
        [MergeGroup::default(), MergeGroup { lse_scale: self.scale }].into()
    }

    /// Returns the segments of an assembled prompt with this scaling applied. The first segment is the system
    /// prompt and stays unchanged. For plain attention the segments are shared, otherwise they are copied.
    #[must_use]
    pub fn apply(&self, segments: &Arc<[Segment]>) -> Arc<[Segment]> {
        let mut segments = Arc::clone(segments);
        if !self.is_plain() {
            for segment in Arc::make_mut(&mut segments).iter_mut().skip(1) {
                segment.logit_scale /= self.temperature;
                segment.merge_group = 1;
            }
        }
        segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcore::BlockId;

    fn segments() -> Arc<[Segment]> {
        let block = |at: u32| Arc::from([BlockId(at)]);
        (0..3).map(|at| Segment::new(block(at), 4, 4 * at as usize, 0)).collect()
    }

    #[test]
    fn documents_are_sharpened_and_merged_apart_and_the_system_prompt_is_as_it_was() {
        let scaling = ContextScaling { temperature: 0.5, scale: 0.75 };
        let scaled = scaling.apply(&segments());
        assert_eq!(scaled[0], segments()[0]);
        for (document, before) in scaled[1..].iter().zip(&segments()[1..]) {
            assert_eq!((document.logit_scale, document.merge_group), (2.0, 1));
            let plain = Segment { logit_scale: 1.0, merge_group: 0, ..document.clone() };
            assert_eq!(plain, *before, "nothing else changes");
        }
        let groups = scaling.groups();
        assert_eq!(groups.iter().map(|group| group.lse_scale).collect::<Vec<_>>(), [1.0, 0.75]);
        assert!(scaled.iter().all(|segment| segment.merge_group < groups.len()));
    }

    #[test]
    fn a_temperature_divides_the_scaling_that_a_segment_has() {
        let mut own = segments();
        Arc::make_mut(&mut own)[2].logit_scale = 3.0;
        let scaled = ContextScaling { temperature: 0.5, scale: 1.0 }.apply(&own);
        assert_eq!(scaled.iter().map(|segment| segment.logit_scale).collect::<Vec<_>>(), [1.0, 2.0, 6.0]);
    }

    #[test]
    fn at_one_nothing_changes_and_no_prompt_is_nothing() {
        let plain = ContextScaling::default();
        let own = segments();
        assert!(Arc::ptr_eq(&plain.apply(&own), &own), "nor is anything copied");
        let scaling = ContextScaling { temperature: 0.5, scale: 0.75 };
        assert_eq!(scaling.apply(&Arc::default()), Arc::default());
        let system: Arc<[Segment]> = segments()[..1].into();
        assert_eq!(scaling.apply(&system), system, "a system prompt alone");
    }

    #[test]
    fn numbers_that_are_not_positive_are_named() {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let named = |scaling: ContextScaling| scaling.check().unwrap_err().to_string();
            assert!(named(ContextScaling { temperature: bad, scale: 1.0 }).contains("temperature"));
            assert!(named(ContextScaling { temperature: 1.0, scale: bad }).contains("scale"));
        }
    }
}
