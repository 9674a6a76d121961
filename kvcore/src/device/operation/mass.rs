//! The attention mass of tokens: softmax weights, summed for each token.

use super::entry::Storages;
use super::{Attend, AttendRows, apart, innermost_dense, mla, writable};
use crate::base::{DType, Error, Result, same};
use crate::device::TensorView;

// Decision: docs/decisions/device.md#the-attention-mass-reads-the-log-sum-exps
/// Adds the softmax weights that an attention gave to the tokens before a sequence's own rows.
///
/// The attention must have run before and written its log-sum-exps to `attend.lse`. For each row of the entry
/// and each query head, the weight of a token is `exp(logit − lse)`. The logit is the one in [`Attend`], or
/// the one in [`AttendMla`](super::AttendMla) if there are latent queries. Tokens that a row does not see
/// have weight 0. Each element of `sums` grows by its token's weights, summed over rows and query heads.
///
/// Merge groups are ignored. The weights are the attention's own weights only if every group has the factor
/// 1.
///
/// The weights are always added in the same order, so equal inputs give equal bits on the same device.
#[derive(Debug, Clone)]
pub struct AttendMass {
    /// The attention whose weights are summed. Its output is neither read nor written.
    pub attend: Attend,
    /// The latent queries of an attention over latents, as in [`AttendMla`](super::AttendMla).
    pub q_latent: Option<TensorView>,
    /// Index of the entry in the work's batch.
    pub entry: usize,
    /// One sum for each token of all the entry's segments but the last, `[tokens]` in f32. Must not overlap
    /// any other operand.
    pub sums: TensorView,
}

impl AttendMass {
    /// Returns the entry whose weights are summed, or `None` if the batch does not have it.
    pub fn rows(&self) -> Option<&AttendRows> {
        self.attend.work.batch().get(self.entry)
    }

    /// Checks the attention, its log-sum-exps, the entry and the sums.
    ///
    /// # Errors
    /// - Returns the errors of [`Attend::check`], or of [`AttendMla::check`](super::AttendMla::check) if
    ///   there are latent queries.
    /// - Returns [`Error::OutOfRange`] if the batch does not have the entry.
    /// - Returns [`Error::InvalidSelection`] if the entry has a selection.
    /// - Returns [`Error::Mismatch`] if the attention has no log-sum-exps, or if the sums have the wrong
    ///   shape or type.
    /// - Returns [`Error::InvalidStrides`] if the sums are not dense.
    /// - Returns [`Error::Aliased`] if the sums overlap another operand.
    pub fn check(&self) -> Result<()> {
        let (attend, sums) = (&self.attend, &self.sums);
        match &self.q_latent {
            Some(q_latent) => mla::check(attend, q_latent)?,
            None => attend.check()?,
        }
        let entries = attend.work.batch().len();
        let entry = self.rows().ok_or_else(|| Error::range("entry", self.entry, entries))?;
        if entry.selection.is_some() {
            let reason = "weights are summed for all tokens that the rows see".to_owned();
            return Err(Error::InvalidSelection { row: entry.rows.start, reason });
        }
        same("rank of sums [tokens]", 1, sums.shape().len())?;
        same("sums, one for each token before the rows", entry.tokens_before(), sums.shape()[0])?;
        if sums.dtype() != DType::F32 {
            return Err(Error::mismatch("sums", DType::F32, sums.dtype()));
        }
        writable("sums", sums)?;
        innermost_dense("sums", sums)?;
        attend.arena.check_apart("sums", sums)?;
        same("log-sum-exps of the attention", 1, usize::from(attend.lse.is_some()))?;
        let mut others = [Some(&attend.q), self.q_latent.as_ref(), attend.lse.as_ref()].into_iter().flatten();
        others.try_for_each(|other| apart("sums and what the attention reads", sums, other))
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        self.attend.storages(storages);
        self.q_latent.iter().chain([&self.sums]).for_each(|view| storages.view(view));
    }

    /// Returns the size of the sums, in bytes.
    pub fn bytes(&self) -> usize {
        self.sums.len() * size_of::<f32>()
    }
}
