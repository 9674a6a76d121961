//! Ranks that are threads of one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::RankAgreement;
use crate::error::{Error, Result};

/// A rank that is a thread of this process.
///
/// ```
/// use std::time::Duration;
/// use kvchunk::{LocalRank, RankAgreement};
/// let mut ranks = LocalRank::group(2, Duration::from_secs(5));
/// let (a, b) = (ranks.remove(0), ranks.remove(0));
/// let other = std::thread::spawn(move || b.agree(&mut [true, false]));
/// let mut flags = [true, true];
/// a.agree(&mut flags)?;
/// assert_eq!(flags, [true, false]);
/// # other.join().unwrap()?;
/// # Ok::<(), kvchunk::Error>(())
/// ```
///
/// # Drop behaviour
/// A dropped rank has left. From then on the other ranks get [`Error::RankLost`].
#[derive(Debug)]
pub struct LocalRank(Arc<RankGroup>);

#[derive(Debug)]
struct RankGroup {
    ranks: usize,
    limit: Duration,
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    /// The flags of the ranks that have come so far.
    flags: Vec<bool>,
    come: usize,
    /// The number of rounds that have ended. `agreed` is the result of the last one. No rank is a round ahead
    /// of another.
    ended: u64,
    agreed: Vec<bool>,
    failed: Option<Error>,
}

impl LocalRank {
    /// Creates a group of `ranks` ranks, one for each thread. A rank waits for the others no longer than
    /// `limit`.
    pub fn group(ranks: usize, limit: Duration) -> Vec<Self> {
        let (round, changed) = (Mutex::default(), Condvar::new());
        let group = Arc::new(RankGroup { ranks, limit, round, changed });
        (0..ranks).map(|_| Self(Arc::clone(&group))).collect()
    }
}

impl RankGroup {
    /// Fails the round, for all ranks and for good.
    fn fail(&self, round: &mut Round, error: Error) -> Error {
        self.changed.notify_all();
        round.failed.get_or_insert(error).clone()
    }
}

impl RankAgreement for LocalRank {
    fn agree(&self, flags: &mut [bool]) -> Result<()> {
        let group = &self.0;
        let (since, mut round) = (Instant::now(), group.round.lock());
        if round.failed.is_none() && round.come > 0 && round.flags.len() != flags.len() {
            let error = Error::RanksDiffer { own: flags.len(), others: round.flags.len() };
            return Err(group.fail(&mut round, error));
        }
        if let Some(error) = &round.failed {
            return Err(error.clone());
        }
        if round.come == 0 {
            round.flags = flags.to_vec();
        }
        round.flags.iter_mut().zip(&*flags).for_each(|(all, own)| *all &= *own);
        round.come += 1;
        if round.come == group.ranks {
            (round.agreed, round.come) = (std::mem::take(&mut round.flags), 0);
            round.ended += 1;
            group.changed.notify_all();
        } else {
            let this = round.ended;
            while round.ended == this && round.failed.is_none() {
                let left = group.limit.saturating_sub(since.elapsed());
                if group.changed.wait_for(&mut round, left).timed_out() && round.ended == this {
                    return Err(group.fail(&mut round, Error::RankLost { limit: group.limit }));
                }
            }
            if round.ended == this
                && let Some(error) = &round.failed
            {
                return Err(error.clone());
            }
        }
        flags.copy_from_slice(&round.agreed);
        Ok(())
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        let group = &self.0;
        group.fail(&mut group.round.lock(), Error::RankLost { limit: group.limit });
    }
}

#[cfg(test)]
mod tests {
    use super::super::shortest;
    use super::*;

    #[test]
    fn flags_are_kept_that_are_set_on_all_round_after_round() {
        let ranks = LocalRank::group(3, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for (i, rank) in (0..).zip(&ranks) {
                scope.spawn(move || {
                    for round in 0..500u64 {
                        let of = |rank: u64| (0..5).map(move |at| (round * 7 + at * 3 + rank * 5) % 4 > 1);
                        let mut flags: Vec<bool> = of(i).collect();
                        rank.agree(&mut flags).unwrap();
                        let all = of(0).zip(of(1)).zip(of(2)).map(|((a, b), c)| a && b && c);
                        assert_eq!(flags, all.collect::<Vec<_>>(), "rank {i}, round {round}");
                        assert_eq!(shortest(rank, 3 + round as usize % 2, 9), Ok(3 + round as usize % 2));
                        let length = 3 + usize::from(i == round % 3);
                        assert_eq!(shortest(rank, length, 9), Ok(3));
                        assert_eq!(shortest(rank, i as usize, 9), Ok(0));
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_leaves_or_asks_something_else_ends_the_request_on_all() {
        let lost = Error::RankLost { limit: Duration::from_millis(20) };
        let mut ranks = LocalRank::group(3, Duration::from_millis(20));
        assert_eq!(ranks[0].agree(&mut [true]), Err(lost.clone()), "nobody else came");
        assert_eq!(ranks[1].agree(&mut [true]), Err(lost.clone()), "and it stays so");
        ranks = LocalRank::group(2, Duration::from_secs(60));
        let (a, b) = (ranks.remove(0), ranks.remove(0));
        let waiting = std::thread::spawn(move || a.agree(&mut [true]));
        drop(b);
        assert!(matches!(waiting.join().unwrap(), Err(Error::RankLost { .. })));
        ranks = LocalRank::group(2, Duration::from_secs(60));
        let (a, b) = (ranks.remove(0), ranks.remove(0));
        let results = std::thread::scope(|scope| {
            let a = scope.spawn(|| a.agree(&mut [true]));
            let b = scope.spawn(|| b.agree(&mut [true, true]));
            [a.join().unwrap(), b.join().unwrap()]
        });
        assert!(results.iter().all(|result| matches!(result, Err(Error::RanksDiffer { .. }))), "{results:?}");
    }
}
