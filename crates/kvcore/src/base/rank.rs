//! One rank's place in tensor, pipeline and data parallelism, and what it holds of a model.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::base::{Error, Result};

/// A rank's place. Sizes of 1 mean that a dimension is not cut.
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
    /// Place among the ranks that share heads.
    pub tp_rank: usize,
    /// Ranks that share heads.
    pub tp_size: usize,
    /// Place among the pipeline's stages.
    pub pp_rank: usize,
    /// Stages of the pipeline.
    pub pp_size: usize,
    /// Place among the ranks that share a batch.
    pub dp_rank: usize,
    /// Ranks that share a batch.
    pub dp_size: usize,
}

impl Default for RankInfo {
    /// The only rank.
    fn default() -> Self {
        Self { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1, dp_rank: 0, dp_size: 1 }
    }
}

/// A rank's share of a model's K or V heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShare {
    /// First head of the model that this rank holds.
    pub first: usize,
    /// Heads that this rank holds.
    pub count: usize,
    /// Ranks that hold the same heads; more than 1 where a model has fewer heads than there are ranks.
    pub replicas: usize,
}

impl HeadShare {
    /// The heads as numbered in the model.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

impl RankInfo {
    /// Rank `rank` of `size` that share heads.
    ///
    /// # Errors
    /// [`Error::Zero`] for no ranks, [`Error::OutOfRange`] for a rank past the last.
    pub fn tensor_parallel(rank: usize, size: usize) -> Result<Self> {
        Self { tp_rank: rank, tp_size: size, ..Self::default() }.checked()
    }

    /// Stage `rank` of `size` of a pipeline.
    ///
    /// # Errors
    /// As [`tensor_parallel`](Self::tensor_parallel).
    pub fn pipeline(rank: usize, size: usize) -> Result<Self> {
        Self { pp_rank: rank, pp_size: size, ..Self::default() }.checked()
    }

    /// The same place if it exists.
    ///
    /// # Errors
    /// [`Error::Zero`] and [`Error::OutOfRange`], for any of the three dimensions.
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

    /// This rank's query heads.
    ///
    /// # Errors
    /// [`Error::Uneven`] if they do not divide among the ranks.
    pub fn query_heads(&self, heads: usize) -> Result<HeadShare> {
        let Self { tp_rank, tp_size, .. } = self.checked()?;
        if heads == 0 || !heads.is_multiple_of(tp_size) {
            return Err(Error::Uneven { what: "query heads", count: heads, ranks: tp_size });
        }
        let count = heads / tp_size;
        Ok(HeadShare { first: tp_rank * count, count, replicas: 1 })
    }

    /// This rank's K or V heads. With fewer heads than ranks, neighbouring ranks hold replicas.
    ///
    /// # Errors
    /// [`Error::Uneven`] if neither divides the other.
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

    /// This stage's layers: as evenly as possible, earlier stages one more where it does not divide.
    ///
    /// # Errors
    /// [`Error::Uneven`] for fewer layers than stages.
    pub fn layers(&self, layers: usize) -> Result<Range<usize>> {
        let rank = self.checked()?;
        slice("layers", layers, rank.pp_rank, rank.pp_size)
    }

    /// This rank's entries of a batch: as evenly as possible.
    ///
    /// ```
    /// use kvcore::RankInfo;
    /// let rank = |dp_rank| RankInfo { dp_rank, dp_size: 3, ..RankInfo::default() };
    /// assert_eq!([rank(0).batch(8)?, rank(1).batch(8)?, rank(2).batch(8)?], [0..3, 3..6, 6..8]);
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Uneven`] for fewer entries than ranks.
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
        let rank = RankInfo::tensor_parallel(0, 8).unwrap();
        assert!(rank.query_heads(2).is_err(), "query heads are never replicated");
        assert!(RankInfo::pipeline(0, 4).unwrap().layers(3).is_err());
        assert!(RankInfo::tensor_parallel(4, 4).is_err() && RankInfo::tensor_parallel(0, 0).is_err());
    }
}
