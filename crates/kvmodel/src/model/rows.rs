//! The rows of a batch, laid after one another.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use kvcore::kernels::{AttendRows, QueryRow};
use kvcore::{Logits, SequenceInput, SlotMapping};

use crate::error::{Error, Result};

/// What a pass computes, row by row.
pub(super) struct Rows {
    pub(super) tokens: Vec<u32>,
    pub(super) queries: Arc<[QueryRow]>,
    pub(super) positions: Arc<[i64]>,
    pub(super) slots: SlotMapping,
    pub(super) batch: Arc<[AttendRows]>,
    /// Rows of each sequence whose logits are wanted, as a range of `tokens`.
    logits: Vec<std::ops::Range<usize>>,
}

/// The rows that go through the end of the last layer.
pub(super) struct Wanted {
    pub(super) index: Tensor,
    pub(super) rows: Arc<[QueryRow]>,
    pub(super) batch: Arc<[AttendRows]>,
}

impl Rows {
    pub(super) fn new(batch: &[SequenceInput], vocabulary: usize) -> Result<Self> {
        let tokens: Vec<u32> = batch.iter().flat_map(|s| s.tokens.iter().copied()).collect();
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::TokenOutOfVocabulary { token, vocabulary });
        }
        for sequence in batch {
            if sequence.slots.len() != sequence.tokens.len() {
                let (expected, got) = (sequence.tokens.len(), sequence.slots.len());
                return Err(kvcore::Error::Mismatch { what: "slots of a sequence", expected, got }.into());
            }
        }
        let rows: Arc<[QueryRow]> = batch.iter().flat_map(SequenceInput::rows).collect();
        let (mut entries, mut logits, mut at) = (Vec::new(), Vec::new(), 0);
        for sequence in batch {
            let range = at..at + sequence.tokens.len();
            at = range.end;
            entries.push(AttendRows::new(range.clone(), sequence.segments.clone()));
            logits.push(match sequence.logits {
                Logits::None => range.end..range.end,
                Logits::Last => range.end.saturating_sub(1).max(range.start)..range.end,
                Logits::All => range,
            });
        }
        Ok(Self {
            positions: rows.iter().map(|row| row.position).collect(),
            slots: SlotMapping::concat(batch.iter().map(|s| &s.slots)),
            batch: entries.into(),
            tokens,
            queries: rows,
            logits,
        })
    }

    pub(super) fn wanted(&self) -> Result<Wanted> {
        let index: Vec<u32> = self.logits.iter().cloned().flatten().map(|row| row as u32).collect();
        let (mut batch, mut at) = (Vec::new(), 0);
        for (entry, wanted) in self.batch.iter().zip(&self.logits) {
            let range = at..at + wanted.len();
            at = range.end;
            batch.push(AttendRows::new(range, Arc::clone(&entry.segments)));
        }
        Ok(Wanted {
            rows: index.iter().map(|&row| self.queries[row as usize]).collect(),
            batch: batch.into(),
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
