//! The rows of a batch, one sequence after the other.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use kvcore::{AttendRows, AttendWork, Logits, MergeGroup, QueryRow, Segment, SequenceInput, WriteSlots};

use crate::error::{Error, Result};

/// The rows that a pass computes.
pub(super) struct Rows {
    pub(super) tokens: Vec<u32>,
    /// The positions that keys are rotated to.
    pub(super) positions: Arc<[i64]>,
    pub(super) slots: WriteSlots,
    /// The attention work of the rows, equal for all layers.
    pub(super) work: Arc<AttendWork>,
    /// The rows of each sequence whose logits are wanted, as a range of `tokens`.
    logits: Vec<std::ops::Range<usize>>,
}

/// The rows that go through the end of the last layer.
pub(super) struct Wanted {
    pub(super) index: Tensor,
    pub(super) work: Arc<AttendWork>,
}

impl Rows {
    pub(super) fn new(batch: &[SequenceInput], vocabulary: usize) -> Result<Self> {
        let tokens: Vec<u32> = batch.iter().flat_map(|s| s.tokens.iter().copied()).collect();
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::TokenOutOfVocabulary { token, vocabulary });
        }
        for sequence in batch {
            sequence.check()?;
        }
        let rows: Vec<QueryRow> = batch.iter().flat_map(SequenceInput::rows).collect();
        let (mut entries, mut logits, mut at, mut groups) = (Vec::new(), Vec::new(), 0, Vec::new());
        for sequence in batch {
            let range = at..at + sequence.tokens.len();
            at = range.end;
            entries.push(AttendRows::new(range.clone(), grouped(sequence, &mut groups)?));
            logits.push(match sequence.logits {
                Logits::None => range.end..range.end,
                Logits::Last => range.end.saturating_sub(1).max(range.start)..range.end,
                Logits::All => range,
            });
        }
        Ok(Self {
            positions: batch.iter().flat_map(SequenceInput::key_positions).collect(),
            slots: WriteSlots::concat(batch.iter().map(|s| &s.slots)),
            work: Arc::new(AttendWork::with_groups(rows, entries, groups)),
            tokens,
            logits,
        })
    }

    /// Counts the visible tokens over all rows, on which the cost of attention depends. Windows are not
    /// subtracted.
    pub(super) fn visible(work: &AttendWork) -> u64 {
        let seen = |row: &QueryRow, segment: &Segment| {
            (row.logical + 1).saturating_sub(segment.logical_start).min(segment.len) as u64
        };
        let of = |entry: &AttendRows| -> u64 {
            let rows = &work.rows()[entry.rows.clone()];
            rows.iter().map(|row| entry.segments.iter().map(|segment| seen(row, segment)).sum::<u64>()).sum()
        };
        work.batch().iter().map(of).sum()
    }

    pub(super) fn wanted(&self) -> Result<Wanted> {
        let index: Vec<u32> = self.logits.iter().cloned().flatten().map(|row| row as u32).collect();
        let (mut batch, mut at) = (Vec::new(), 0);
        for (entry, wanted) in self.work.batch().iter().zip(&self.logits) {
            let range = at..at + wanted.len();
            at = range.end;
            batch.push(AttendRows::new(range, Arc::clone(&entry.segments)));
        }
        Ok(Wanted {
            work: Arc::new(AttendWork::with_groups(
                index.iter().map(|&row| self.work.rows()[row as usize]).collect::<Vec<_>>(),
                batch,
                Arc::clone(self.work.groups()),
            )),
            index: Tensor::from_vec(index.clone(), index.len(), &Device::Cpu)?,
        })
    }

    pub(super) fn split(&self, logits: &Tensor) -> Result<Vec<Tensor>> {
        let (mut out, mut at) = (Vec::new(), 0);
        for wanted in self.logits.iter().filter(|wanted| !wanted.is_empty()) {
            out.push(logits.narrow(0, at, wanted.len())?);
            at += wanted.len();
        }
        Ok(out)
    }
}

/// Returns a sequence's segments with the merge groups of the whole batch. Equal groups become one.
fn grouped(sequence: &SequenceInput, groups: &mut Vec<MergeGroup>) -> Result<Arc<[Segment]>> {
    let place = |segment: &Segment| {
        let (asked, limit) = (segment.merge_group, sequence.groups.len());
        let group = sequence.groups.get(asked).copied();
        let group = group.ok_or(kvcore::Error::OutOfRange {
            what: "merge group of a sequence",
            value: asked as i128,
            limit: limit as i128,
        })?;
        let at = groups.iter().position(|known| *known == group).unwrap_or_else(|| {
            groups.push(group);
            groups.len() - 1
        });
        Ok(Segment { merge_group: at, ..segment.clone() })
    };
    sequence.segments.iter().map(place).collect()
}
