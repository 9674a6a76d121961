//! The records that are being written while a checkpoint is.
//!
//! A checkpoint does not list them, so it keeps their cells open and says that newer headers count. Cells that another
//! such header is in stay out of it until then.

use std::collections::BTreeMap;

use kvcore::BlockKey;

use crate::record::CellRun;

/// A record that is being written: the number of the write, its cells, and the key of the record that it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) sequence: u64,
    pub(super) runs: Vec<CellRun>,
    pub(super) parent: Option<BlockKey>,
}

/// The cells of records that are being written, and free cells whose headers are newer than one of these records.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// The cells of each record that is being written, by the number of its write.
    written: BTreeMap<u64, Vec<CellRun>>,
    /// The free cells, by the number of the write that was their last one.
    freed: BTreeMap<u64, Vec<CellRun>>,
}

impl InFlight {
    /// Adds a record that is being written from now on.
    pub(super) fn begin(&mut self, sequence: u64, runs: &[CellRun]) {
        self.written.insert(sequence, runs.to_vec());
    }

    /// Ends the writing of a record. Returns the free cells that a checkpoint may open from now on.
    pub(super) fn end(&mut self, sequence: u64) -> impl Iterator<Item = CellRun> + use<> {
        self.written.remove(&sequence);
        let later = match self.first() {
            Some(first) => self.freed.split_off(&first),
            None => BTreeMap::new(),
        };
        std::mem::replace(&mut self.freed, later).into_values().flatten()
    }

    /// Keeps cells that have become free, and whose last write has this number. Gives them back as `Err` if a checkpoint
    /// may open them.
    pub(super) fn keep(&mut self, sequence: u64, runs: Vec<CellRun>) -> Result<(), Vec<CellRun>> {
        if self.first().is_none_or(|first| sequence < first) {
            return Err(runs);
        }
        self.freed.entry(sequence).or_default().extend(runs);
        Ok(())
    }

    /// Returns whether this write has not ended.
    pub(super) fn is_written(&self, sequence: u64) -> bool {
        self.written.contains_key(&sequence)
    }

    /// Returns the number of the oldest write that has not ended.
    pub(super) fn first(&self) -> Option<u64> {
        self.written.keys().next().copied()
    }

    /// Returns the cells of the records that are being written.
    pub(super) fn written(&self) -> impl Iterator<Item = CellRun> {
        self.written.values().flatten().copied()
    }

    /// Returns the free cells.
    pub(super) fn freed(&self) -> impl Iterator<Item = CellRun> {
        self.freed.values().flatten().copied()
    }

    /// Returns the number of free cells.
    pub(super) fn freed_cells(&self) -> u32 {
        self.freed().map(|run| run.count).sum()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn cell(start: u32) -> Vec<CellRun> {
        vec![CellRun { start, count: 1 }]
    }

    #[test]
    fn cells_wait_for_the_writes_that_are_older_than_their_own() {
        let mut flight = InFlight::default();
        assert_eq!(flight.keep(3, cell(1)), Err(cell(1)), "nothing is being written");
        flight.begin(5, &cell(2));
        flight.begin(7, &cell(3));
        assert_eq!(flight.keep(4, cell(1)), Err(cell(1)));
        flight.keep(6, cell(4)).unwrap();
        flight.keep(9, cell(5)).unwrap();
        assert_eq!((flight.first(), flight.freed_cells()), (Some(5), 2));
        assert_eq!(flight.written().map(|run| run.start).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(flight.end(5).map(|run| run.start).collect::<Vec<_>>(), [4]);
        assert_eq!(flight.freed().map(|run| run.start).collect::<Vec<_>>(), [5], "7 is still being written");
        assert_eq!(flight.end(7).map(|run| run.start).collect::<Vec<_>>(), [5]);
        assert_eq!((flight.first(), flight.freed_cells()), (None, 0));
    }
}
