//! A rank's indices in tensor, pipeline and data parallelism, and its share of the model.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result};

/// A rank's index and the number of ranks in each parallel dimension. A size of 1 means that the dimension is
/// not split.
///
/// ```
/// use kvcore::RankInfo;
/// let rank = RankInfo::tensor_parallel(1, 4)?;
/// assert_eq!(rank.kv_heads(32)?.range(), 8..16);
/// assert_eq!(rank.kv_heads(2)?.range(), 0..1);     // ranks 0 and 1 hold a replica each of head 0
/// assert!(rank.kv_heads(6).is_err());              // 6 heads do not divide among 4 ranks
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// Index of this rank among the ranks that split the heads.
    pub tp_rank: usize,
    /// Number of ranks that split the heads.
    pub tp_size: usize,
    /// Index of this rank's stage in the pipeline.
    pub pp_rank: usize,
    /// Number of stages in the pipeline.
    pub pp_size: usize,
    /// Index of this rank among the ranks that split a batch.
    pub dp_rank: usize,
    /// Number of ranks that split a batch.
    pub dp_size: usize,
}

impl Default for RankInfo {
    /// Returns the `RankInfo` of a single rank, which holds the whole model and batch.
    fn default() -> Self {
        Self { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1, dp_rank: 0, dp_size: 1 }
    }
}

/// A rank's share of a model's K or V heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShare {
    /// Index of the first head that this rank holds, numbered as in the model.
    pub first: usize,
    /// Number of heads that this rank holds.
    pub count: usize,
    /// Number of ranks that hold the same heads. Greater than 1 if there are fewer heads than ranks.
    pub replicas: usize,
}

impl HeadShare {
    /// Returns the heads of this rank, numbered as in the model.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

impl RankInfo {
    /// Creates a `RankInfo` for rank `rank` of `size` tensor-parallel ranks, which split the heads.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `size` is 0, and [`Error::OutOfRange`] if `rank` is not below `size`.
    pub fn tensor_parallel(rank: usize, size: usize) -> Result<Self> {
        Self { tp_rank: rank, tp_size: size, ..Self::default() }.checked()
    }

    /// Creates a `RankInfo` for stage `rank` of a pipeline with `size` stages.
    ///
    /// # Errors
    /// Returns the errors of [`tensor_parallel`](Self::tensor_parallel).
    pub fn pipeline(rank: usize, size: usize) -> Result<Self> {
        Self { pp_rank: rank, pp_size: size, ..Self::default() }.checked()
    }

    /// Checks all indices and sizes, and returns `self` if they are valid.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if a size is 0, and [`Error::OutOfRange`] if a rank is not below its size,
    /// in any of the three dimensions.
    pub fn checked(self) -> Result<Self> {
        for (what, rank, size) in [
            ("tp_rank", self.tp_rank, self.tp_size),
            ("pp_rank", self.pp_rank, self.pp_size),
            ("dp_rank", self.dp_rank, self.dp_size),
        ] {
            if size == 0 {
                return Err(Error::Zero { what: "number of ranks" });
            }
            if rank >= size {
                return Err(Error::range(what, rank, size));
            }
        }
        Ok(self)
    }

    /// Returns the K or V heads of this rank. If there are fewer heads than ranks, each head is replicated on
    /// several neighbouring ranks.
    ///
    /// # Errors
    /// Returns [`Error::Uneven`] if `heads` is 0, or if neither `heads` nor the number of ranks is a multiple
    /// of the other, and the errors of [`checked`](Self::checked).
    pub fn kv_heads(&self, heads: usize) -> Result<HeadShare> {
        let Self { tp_rank, tp_size, .. } = self.checked()?;
        if heads > 0 && heads < tp_size && tp_size.is_multiple_of(heads) {
            let replicas = tp_size / heads;
            return Ok(HeadShare { first: tp_rank / replicas, count: 1, replicas });
        }
        if heads == 0 || !heads.is_multiple_of(tp_size) {
            return Err(Error::Uneven { what: "KV heads", count: heads, ranks: tp_size });
        }
        let count = heads / tp_size;
        Ok(HeadShare { first: tp_rank * count, count, replicas: 1 })
    }

    /// Returns the layers of this stage. The split is as even as possible: earlier stages hold the extra
    /// layers.
    ///
    /// # Errors
    /// Returns [`Error::Uneven`] if there are fewer layers than stages, and the errors of
    /// [`checked`](Self::checked).
    pub fn layers(&self, layers: usize) -> Result<Range<usize>> {
        let rank = self.checked()?;
        slice("layers", layers, rank.pp_rank, rank.pp_size)
    }

    /// Returns the entries of a batch that belong to this rank. The split is as even as possible: earlier
    /// ranks hold the extra entries.
    ///
    /// ```
    /// use kvcore::RankInfo;
    /// let rank = |dp_rank| RankInfo { dp_rank, dp_size: 3, ..RankInfo::default() };
    /// assert_eq!([rank(0).batch(8)?, rank(1).batch(8)?, rank(2).batch(8)?], [0..3, 3..6, 6..8]);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Uneven`] if there are fewer entries than ranks, and the errors of
    /// [`checked`](Self::checked).
    pub fn batch(&self, entries: usize) -> Result<Range<usize>> {
        let rank = self.checked()?;
        slice("batch entries", entries, rank.dp_rank, rank.dp_size)
    }
}

fn slice(what: &'static str, count: usize, rank: usize, ranks: usize) -> Result<Range<usize>> {
    if count < ranks {
        return Err(Error::Uneven { what, count, ranks });
    }
    let (each, more) = (count / ranks, count % ranks);
    let start = rank * each + rank.min(more);
    Ok(start..start + each + usize::from(rank < more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_cover_everything_once() {
        for (heads, ranks) in [(32, 4), (8, 8), (5, 1)] {
            let held: Vec<usize> = (0..ranks)
                .flat_map(|r| RankInfo::tensor_parallel(r, ranks).unwrap().kv_heads(heads).unwrap().range())
                .collect();
            assert_eq!(held, (0..heads).collect::<Vec<_>>());
        }
        for (layers, stages) in [(36, 3), (7, 3), (3, 3)] {
            let held: Vec<usize> = (0..stages)
                .flat_map(|r| RankInfo::pipeline(r, stages).unwrap().layers(layers).unwrap())
                .collect();
            assert_eq!(held, (0..layers).collect::<Vec<_>>());
        }
        let dp = |dp_rank| RankInfo { dp_rank, dp_size: 3, ..RankInfo::default() }.batch(8).unwrap();
        assert_eq!([dp(0), dp(1), dp(2)], [0..3, 3..6, 6..8]);
    }

    #[test]
    fn few_heads_are_replicated_and_uneven_ones_refused() {
        let share = |r, heads| RankInfo::tensor_parallel(r, 8).unwrap().kv_heads(heads);
        let firsts: Vec<usize> = (0..8).map(|r| share(r, 2).unwrap().first).collect();
        assert_eq!(firsts, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(share(3, 2).unwrap().replicas, 4);
        for heads in [0, 3, 12] {
            assert_eq!(share(0, heads), Err(Error::Uneven { what: "KV heads", count: heads, ranks: 8 }));
        }
        assert!(RankInfo::pipeline(0, 4).unwrap().layers(3).is_err());
        assert!(RankInfo::tensor_parallel(4, 4).is_err() && RankInfo::tensor_parallel(0, 0).is_err());
    }
}
