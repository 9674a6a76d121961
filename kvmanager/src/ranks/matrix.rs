//! The record of the pieces that have arrived in a merge.

use std::fmt;

use crate::error::{CoreError, range};
use crate::{Error, Result};

/// The matrix `[num_chunks, num_stages]` of a merge, with 1 for every piece that has arrived and 0 for every
/// missing piece. Its `Display` output is a table.
///
/// ```
/// use kvmanager::ReceivedMatrix;
/// let mut received = ReceivedMatrix::new(2, 3)?;
/// for stage in 0..3 {
///     received.record(0, stage)?;
/// }
/// received.record(1, 2)?;
/// assert_eq!(received.missing().collect::<Vec<_>>(), [(1, 0), (1, 1)]);
/// assert_eq!(received.to_string(), "\
/// Chunk    |  PP0  PP1  PP2
/// -------------------------
/// Chunk0   |    1    1    1
/// Chunk1   |    0    0    1
/// received: 4/6 (66.7 %)");
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedMatrix {
    /// For each piece, true if it has arrived. Pieces are ordered by chunk and then by stage.
    received: Vec<bool>,
    stages: usize,
}

impl ReceivedMatrix {
    /// Creates a matrix in which no piece has arrived.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Zero`] if there are no chunks or no stages, and [`kvcore::Error::Overflow`]
    /// if the number of pieces overflows.
    pub fn new(chunks: usize, stages: usize) -> Result<Self> {
        for (what, count) in [("chunks", chunks), ("stages", stages)] {
            if count == 0 {
                return Err(Error::Core(CoreError::Zero { what }));
            }
        }
        let pieces = chunks.checked_mul(stages).filter(|&pieces| isize::try_from(pieces).is_ok());
        let pieces = pieces.ok_or(CoreError::Overflow { what: "pieces of a merge" })?;
        Ok(Self { received: vec![false; pieces], stages })
    }

    /// Returns the number of chunks.
    pub fn num_chunks(&self) -> usize {
        self.received.len() / self.stages
    }

    /// Returns the number of stages.
    pub fn num_stages(&self) -> usize {
        self.stages
    }

    fn index(&self, chunk: usize, stage: usize) -> Result<usize> {
        if chunk >= self.num_chunks() {
            return Err(range("chunk", chunk, self.num_chunks()));
        }
        if stage >= self.stages {
            return Err(range("stage", stage, self.stages));
        }
        Ok(chunk * self.stages + stage)
    }

    /// Records the arrival of a piece.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the chunk or stage does not exist, and
    /// [`Error::DuplicatePiece`] if the piece has already arrived.
    pub fn record(&mut self, chunk: usize, stage: usize) -> Result<()> {
        let at = self.index(chunk, stage)?;
        if std::mem::replace(&mut self.received[at], true) {
            return Err(Error::DuplicatePiece { chunk, stage });
        }
        Ok(())
    }

    /// Returns whether a piece has arrived.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the chunk or stage does not exist.
    pub fn is_received(&self, chunk: usize, stage: usize) -> Result<bool> {
        Ok(self.received[self.index(chunk, stage)?])
    }

    /// Returns whether all pieces of a chunk have arrived.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the chunk does not exist.
    pub fn is_chunk_complete(&self, chunk: usize) -> Result<bool> {
        let start = self.index(chunk, 0)?;
        Ok(self.received[start..start + self.stages].iter().all(|&received| received))
    }

    /// Returns whether all pieces of a stage have arrived.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the stage does not exist.
    pub fn is_stage_complete(&self, stage: usize) -> Result<bool> {
        let start = self.index(0, stage)?;
        Ok(self.received[start..].iter().step_by(self.stages).all(|&received| received))
    }

    /// Returns the number of complete chunks before the first incomplete chunk.
    pub fn chunks_in_a_row(&self) -> usize {
        self.chunks().take_while(|chunk| chunk.iter().all(|&received| received)).count()
    }

    fn chunks(&self) -> impl Iterator<Item = &[bool]> {
        self.received.chunks_exact(self.stages)
    }

    /// Returns whether all pieces have arrived.
    pub fn is_complete(&self) -> bool {
        self.received.iter().all(|&received| received)
    }

    /// Returns the number of pieces that have arrived.
    pub fn received(&self) -> usize {
        self.received.iter().filter(|&&received| received).count()
    }

    /// Returns the total number of pieces.
    pub fn total(&self) -> usize {
        self.received.len()
    }

    /// Returns the fraction of pieces that have arrived, between 0 and 1.
    pub fn completion(&self) -> f64 {
        self.received() as f64 / self.total() as f64
    }

    /// Returns the missing pieces as `(chunk, stage)`, ordered by chunk and then by stage.
    pub fn missing(&self) -> impl Iterator<Item = (usize, usize)> {
        let places = self.received.iter().enumerate().filter(|(_, received)| !**received);
        places.map(|(at, _)| (at / self.stages, at % self.stages))
    }

    /// Returns the rows of the matrix, one for each chunk.
    pub fn rows(&self) -> Vec<Vec<u8>> {
        self.chunks().map(|chunk| chunk.iter().map(|&received| u8::from(received)).collect()).collect()
    }
}

impl fmt::Display for ReceivedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |prefix: &str, count: usize| format!("{prefix}{}", count - 1).len();
        let (name, cell) = (width("Chunk", self.num_chunks()).max(8) + 1, width("  PP", self.stages));
        write!(f, "{:<name$}|", "Chunk")?;
        (0..self.stages).try_for_each(|stage| write!(f, "{:>cell$}", format!("PP{stage}")))?;
        write!(f, "\n{}", "-".repeat(name + 1 + cell * self.stages))?;
        for (chunk, row) in self.chunks().enumerate() {
            write!(f, "\n{:<name$}|", format!("Chunk{chunk}"))?;
            row.iter().try_for_each(|&received| write!(f, "{:>cell$}", u8::from(received)))?;
        }
        write!(f, "\nreceived: {}/{} ({:.1} %)", self.received(), self.total(), 100.0 * self.completion())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: &[&[u8]]) -> ReceivedMatrix {
        let mut matrix = ReceivedMatrix::new(rows.len(), rows[0].len()).unwrap();
        for (chunk, row) in rows.iter().enumerate() {
            for (stage, _) in row.iter().enumerate().filter(|(_, cell)| **cell == 1) {
                matrix.record(chunk, stage).unwrap();
            }
        }
        matrix
    }

    #[test]
    fn the_table_is_the_seeds() {
        let mut full = ReceivedMatrix::new(2, 3).unwrap();
        for (chunk, stage) in [(1, 2), (0, 0), (0, 2), (1, 0), (0, 1), (1, 1)] {
            assert!(!full.is_complete());
            full.record(chunk, stage).unwrap();
        }
        let expected = "Chunk    |  PP0  PP1  PP2\n\
                        -------------------------\n\
                        Chunk0   |    1    1    1\n\
                        Chunk1   |    1    1    1\n\
                        received: 6/6 (100.0 %)";
        assert_eq!(full.to_string(), expected);
    }

    #[test]
    fn long_numbers_keep_the_columns() {
        let mut wide = ReceivedMatrix::new(1001, 11).unwrap();
        wide.record(1000, 10).unwrap();
        let text = wide.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "Chunk     |   PP0   PP1   PP2   PP3   PP4   PP5   PP6   PP7   PP8   PP9  PP10");
        assert_eq!(
            lines[1002],
            "Chunk1000 |     0     0     0     0     0     0     0     0     0     0     1"
        );
        assert_eq!(lines[1003], "received: 1/11011 (0.0 %)");
    }

    #[test]
    fn completeness_by_piece_chunk_stage_and_in_all() {
        let m = matrix(&[&[1, 1, 0], &[1, 0, 1], &[1, 1, 1]]);
        assert_eq!([0, 1, 2].map(|c| m.is_chunk_complete(c).unwrap()), [false, false, true]);
        assert_eq!([0, 1, 2].map(|s| m.is_stage_complete(s).unwrap()), [true, false, false]);
        assert_eq!(m.chunks_in_a_row(), 0, "the first chunk is incomplete");
        assert_eq!(matrix(&[&[1, 1], &[1, 1], &[0, 1], &[1, 1]]).chunks_in_a_row(), 2);
        assert_eq!(m.rows(), [[1, 1, 0], [1, 0, 1], [1, 1, 1]]);
        assert_eq!((m.received(), m.total(), m.completion()), (7, 9, 7.0 / 9.0));
        assert_eq!(m.missing().collect::<Vec<_>>(), [(0, 2), (1, 1)]);
        assert!(m.is_received(0, 1).unwrap() && !m.is_received(1, 1).unwrap() && !m.is_complete());
    }

    #[test]
    fn duplicates_and_places_outside_are_errors_that_change_nothing() {
        let mut m = matrix(&[&[0, 1], &[0, 0]]);
        let before = m.clone();
        assert_eq!(m.record(0, 1), Err(Error::DuplicatePiece { chunk: 0, stage: 1 }));
        assert_eq!(
            m.record(2, 0),
            Err(Error::Core(CoreError::OutOfRange { what: "chunk", value: 2, limit: 2 }))
        );
        assert_eq!(
            m.record(0, 2),
            Err(Error::Core(CoreError::OutOfRange { what: "stage", value: 2, limit: 2 }))
        );
        assert!(m.is_received(2, 0).is_err() && m.is_chunk_complete(2).is_err());
        assert!(m.is_stage_complete(2).is_err());
        assert_eq!(m, before);
        assert!(matches!(ReceivedMatrix::new(0, 1), Err(Error::Core(CoreError::Zero { what: "chunks" }))));
        assert!(matches!(ReceivedMatrix::new(1, 0), Err(Error::Core(CoreError::Zero { what: "stages" }))));
        assert!(matches!(ReceivedMatrix::new(usize::MAX, 2), Err(Error::Core(CoreError::Overflow { .. }))));
    }
}
