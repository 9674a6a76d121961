//! The whole pool asleep: its memory is released, every piece stays where it is found.

use kvcore::{BlockId, ReservedArena, SleepingBlocks, Stream};

use super::state::{Place, State};
use super::{ChunkCacheManager, Tenant};
use crate::error::{Error, Result};

/// Whether the pool's blocks have memory.
#[derive(Debug)]
pub(super) enum PoolPlace {
    Awake,
    /// Falling asleep or waking, without the lock.
    Moving,
    Asleep(SleepingBlocks),
}

impl PoolPlace {
    pub(super) fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }
}

/// What putting a pool to sleep brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSleep {
    /// Bytes of device memory that were released: of granules in which nothing lies but chunks.
    pub released_bytes: usize,
    /// Bytes of host memory that hold the stored pieces meanwhile.
    pub saved_bytes: usize,
}

impl ChunkCacheManager {
    /// Tag of the pool in [`ReservedArena::asleep`].
    pub const POOL_TAG: &'static str = Tenant::DEFAULT_TAG;

    /// Puts the whole pool to sleep: stored pieces are copied to host memory and the memory of the pool's
    /// blocks is released. `arena` is the one that the pool's block ids belong to.
    ///
    /// Until [`wake_pool`](Self::wake_pool) every request gets [`Acquired::NoRoom`](super::Acquired::NoRoom)
    /// and goes uncached. Pieces keep their blocks: addresses, and what an engine knows of them, stay as they
    /// are. Pieces in a [`SleepStore`](crate::SleepStore) sleep on.
    ///
    /// It waits for `stream`; work on other streams that touches the pool, such as copies of a
    /// [`SleepStore`](crate::SleepStore) that uses another one, must be done before.
    ///
    /// # Errors
    /// [`Error::PoolInUse`] while pieces are held, computed or moved, with how many; [`Error::PoolAsleep`],
    /// [`Error::PoolMoving`], and those of [`ReservedArena::sleep`]. Everything is as before then.
    pub fn sleep_pool(&self, arena: &ReservedArena, stream: &dyn Stream) -> Result<PoolSleep> {
        let keep = self.fall()?;
        let slept = arena.sleep(Self::POOL_TAG, self.0.pool.blocks().range(), &keep, stream);
        let mut state = self.0.lock();
        match slept {
            Ok(asleep) => {
                let (released_bytes, saved_bytes) = (asleep.released_bytes(), asleep.saved_bytes());
                state.pool = PoolPlace::Asleep(asleep);
                Ok(PoolSleep { released_bytes, saved_bytes })
            }
            Err(error) => {
                state.pool = PoolPlace::Awake;
                Err(error.into())
            }
        }
    }

    /// Wakes the pool: every piece is found again, bit for bit where it was. Returns whether it slept. Waits
    /// for `stream`.
    ///
    /// # Errors
    /// [`Error::PoolMoving`], and those of [`SleepingBlocks::wake`]; the pool sleeps on then.
    pub fn wake_pool(&self, stream: &dyn Stream) -> Result<bool> {
        let mut state = self.0.lock();
        let asleep = match std::mem::replace(&mut state.pool, PoolPlace::Moving) {
            PoolPlace::Asleep(asleep) => asleep,
            PoolPlace::Moving => return Err(Error::PoolMoving),
            PoolPlace::Awake => {
                state.pool = PoolPlace::Awake;
                return Ok(false);
            }
        };
        drop(state);
        let woken = asleep.wake(stream);
        let mut state = self.0.lock();
        match woken {
            Ok(()) => {
                state.pool = PoolPlace::Awake;
                Ok(true)
            }
            Err(rejected) => {
                state.pool = PoolPlace::Asleep(rejected.blocks);
                Err(rejected.error.into())
            }
        }
    }

    /// Whether the pool's blocks have memory; `false` also while it falls asleep or wakes.
    pub fn is_pool_awake(&self) -> bool {
        self.0.lock().pool.is_awake()
    }

    /// Closes the pool and says which blocks hold pieces.
    fn fall(&self) -> Result<Vec<BlockId>> {
        let mut state = self.0.lock();
        match state.pool {
            PoolPlace::Awake => {}
            PoolPlace::Moving => return Err(Error::PoolMoving),
            PoolPlace::Asleep(_) => return Err(Error::PoolAsleep),
        }
        let counts = self.0.pool.blocks().counts();
        let (held, flights, charged) = in_use(&state);
        let others = (counts.total - counts.free).saturating_sub(charged);
        if held + flights + others > 0 {
            return Err(Error::PoolInUse { held, flights, others });
        }
        state.pool = PoolPlace::Moving;
        let ids = state.index.iter().filter_map(|entry| match &entry.place {
            Place::Awake(awake) => Some(awake.ids.iter().copied()),
            _ => None,
        });
        Ok(ids.flatten().collect())
    }
}

/// Pieces that are held, pieces under way, and blocks of all pieces that can be found or will be.
fn in_use(state: &State) -> (usize, usize, usize) {
    let entries = || state.index.iter();
    let held = entries().filter(|entry| entry.holders > 0).count();
    let moving = entries().filter(|entry| matches!(entry.place, Place::Moving(_))).count();
    let charged: usize = state.accounts.iter().map(|account| account.used).sum();
    (held, state.under_way.len() + moving, charged - state.orphaned_blocks())
}
