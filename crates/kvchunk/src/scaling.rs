//! Context scaling: how sharply a question looks at chunks that overlap in position.

use std::sync::Arc;

use kvcore::Segment;
use kvcore::kernels::MergeGroup;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Temperature and scale of the context, after APE (Yang et al., *APE: Faster and Longer Context-Augmented
/// Generation via Adaptive Parallel Encoding*, 2025).
///
/// Chunks that were computed apart compete for the question's attention with more mass than one after the
/// other, since each has first tokens of its own. A temperature below 1 sharpens the logits of the chunks;
/// the scale multiplies the log-sum-exp of all chunks together before it is merged with the rest. Both cost
/// nothing here: segments are merged by log-sum-exp anyway. The system prompt and the question's own
/// tokens are left as they are (APE's shared prefix and query).
///
/// ```
/// use kvchunk::ContextScaling;
/// assert!(ContextScaling::default().is_plain());
/// assert!(ContextScaling { temperature: 0.9, scale: 0.9 }.check().is_ok());
/// assert!(ContextScaling { temperature: 0.0, scale: 1.0 }.check().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ContextScaling {
    /// Divides the logits of chunk tokens; 1 is plain attention.
    pub temperature: f32,
    /// Multiplies the log-sum-exp of all chunk tokens; 1 is plain attention.
    pub scale: f32,
}

impl Default for ContextScaling {
    fn default() -> Self {
        Self { temperature: 1.0, scale: 1.0 }
    }
}

impl ContextScaling {
    /// Whether this is plain attention.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Checks that both are positive and finite.
    ///
    /// # Errors
    /// [`Error::NotPositive`].
    pub fn check(&self) -> Result<()> {
        for (what, value) in [("context temperature", self.temperature), ("context scale", self.scale)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::NotPositive { what, value });
            }
        }
        Ok(())
    }

    /// The merge groups that [`apply`](Self::apply) refers to.
    pub fn groups(&self) -> Arc<[MergeGroup]> {
        [MergeGroup::default(), MergeGroup { lse_scale: self.scale }].into()
    }

    /// The segments of an assembled prompt, of which the first is the system prompt, under this scaling.
    pub fn apply(&self, segments: &[Segment]) -> Vec<Segment> {
        let mut segments = segments.to_vec();
        if !self.is_plain() {
            for segment in segments.iter_mut().skip(1) {
                segment.logit_scale /= self.temperature;
                segment.merge_group = 1;
            }
        }
        segments
    }
}
