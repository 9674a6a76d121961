//! Checks that a token can be chosen from the logits of a pass, and finds the reason if it cannot.

use std::ops::Range;

use kvcore::{DType, KvFormat, LayerRopes, Segment, SequenceInput};
use kvmodel::LogitRows;

use crate::error::{Error, Result};
use crate::runner::Runner;

/// The number of tokens whose keys and values are read at a time.
const READ: usize = 1024;

/// Returns true if a row of logits has a finite value, and no value that is not a number.
pub(super) fn are_numbers(logits: &[f32]) -> bool {
    let (mut finite, mut nan) = (false, false);
    for logit in logits {
        finite |= logit.is_finite();
        nan |= logit.is_nan();
    }
    finite && !nan
}

/// Checks the logits that a pass has computed for an input.
///
/// # Errors
/// Returns [`Error::CacheOverflow`] if keys or values exceed the range of the cache's format, and
/// [`Error::NotNumbers`] otherwise.
pub(super) fn check(
    runner: &Runner,
    ropes: &LayerRopes,
    input: &SequenceInput,
    (rows, range): (&LogitRows, Range<usize>),
) -> Result<()> {
    if range.filter_map(|row| rows.row(row)).all(are_numbers) {
        return Ok(());
    }
    Err(reason(runner, ropes, input))
}

/// Returns the reason why the logits of an input are not numbers: looks for the first layer whose stored keys
/// or values are not finite. All layers after it compute with its results.
fn reason(runner: &Runner, ropes: &LayerRopes, input: &SequenceInput) -> Error {
    let unknown = Error::NotNumbers { layer: None };
    let groups = runner.model.groups();
    let device = runner.device();
    for layer in 0..runner.model.config().num_layers() {
        let group = groups.iter().position(|group| group.layers.contains(&layer)).unwrap_or(0);
        let group = if device.arenas.len() > 1 { group } else { 0 };
        let segments = match group.checked_sub(1) {
            None => &input.segments,
            Some(other) => match input.others.get(other) {
                Some(other) => &other.segments,
                None => return unknown,
            },
        };
        // The logits are the failure to report, so a cache that cannot be read only leaves the layer unknown.
        let Ok(broken) = broken(runner, ropes, layer, segments) else { return unknown };
        let format = device.arenas[group].layout().shape().format;
        match broken {
            None => (),
            Some(broken) if broken.is_overflow(format) => return Error::CacheOverflow { layer, format },
            Some(_) => return Error::NotNumbers { layer: Some(layer) },
        }
    }
    unknown
}

/// The way in which keys or values are not finite.
#[derive(Default)]
struct Broken {
    infinite: bool,
    nan: bool,
}

impl Broken {
    /// Returns true if a format cannot store values that may be numbers.
    fn is_overflow(&self, format: KvFormat) -> bool {
        match format {
            // Magnitudes above 65,504 are stored as infinity.
            KvFormat::Dense(DType::F16) => self.infinite && !self.nan,
            // A group whose scale is too large for f16 is not a number as a whole.
            KvFormat::Int8 { .. } | KvFormat::Int4 { .. } => true,
            _ => false,
        }
    }
}

/// Returns how some of the keys and values that a layer stores for the segments are not finite, or `None` if
/// all of them are finite.
fn broken(runner: &Runner, ropes: &LayerRopes, layer: usize, segments: &[Segment]) -> Result<Option<Broken>> {
    let mut broken = Broken::default();
    for segment in segments {
        for first in (0..segment.len).step_by(READ) {
            let tokens = first..segment.len.min(first + READ);
            let (k, v) = runner.model.keys_in_use(&runner.device(), ropes, layer, segment, tokens)?;
            for x in k.iter().chain(&v) {
                broken.nan |= x.is_nan();
                broken.infinite |= x.is_infinite();
            }
        }
    }
    Ok((broken.nan || broken.infinite).then_some(broken))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_needs_a_finite_value_and_no_value_that_is_not_a_number() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert!(are_numbers(&[1.0, -inf]) && are_numbers(&[inf, 0.0]));
        assert!(!are_numbers(&[1.0, nan]) && !are_numbers(&[inf, -inf]) && !are_numbers(&[]));
        assert!(!are_numbers(&[-inf; 3]) && !are_numbers(&[nan; 40]));
    }
}
