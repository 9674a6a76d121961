//! The logits of a pass, on the host.

/// Rows of logits, each with one logit per token in the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitRows {
    values: Vec<f32>,
    vocabulary: usize,
}

impl LogitRows {
    /// Wraps `values`, which must consist of whole rows. The vocabulary must not be empty.
    pub(super) fn new(values: Vec<f32>, vocabulary: usize) -> Self {
        Self { values, vocabulary }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.vocabulary
    }

    /// Returns the vocabulary size, which is the width of a row.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the logits of a row, or `None` if there is no such row.
    pub fn row(&self, row: usize) -> Option<&[f32]> {
        self.values.chunks_exact(self.vocabulary).nth(row)
    }

    /// Returns all logits, row after row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns all logits, row after row, in a vector whose memory the caller may reuse.
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }

    /// Returns the last row's logits, in a vector that keeps the capacity of all rows.
    pub fn into_last(mut self) -> Vec<f32> {
        self.values.drain(..self.values.len().saturating_sub(self.vocabulary));
        self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_one_after_the_other() {
        let logits = LogitRows::new(vec![1.0, 2.0, 3.0, 4.0], 2);
        assert_eq!((logits.rows(), logits.vocabulary()), (2, 2));
        assert_eq!((logits.row(1), logits.row(2)), (Some(&[3.0, 4.0][..]), None));
        assert_eq!(logits.into_last(), [3.0, 4.0]);
    }
}
