//! Puts the whole pool to sleep: its memory is released, but every piece keeps its blocks.

use kvcore::{BlockId, ReservedArena, Stream};

use crate::cache::{CacheState, ChunkCacheManager, PieceMemory, PoolMemory, Tenant};
use crate::error::{Error, Result};

/// The result of putting a pool to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSleep {
    /// The amount of device memory that was released, in bytes. Only allocation granules that contain nothing
    /// but the pool's blocks are released.
    pub released_bytes: usize,
    /// The amount of host memory that holds the stored pieces while the pool sleeps, in bytes.
    pub saved_bytes: usize,
}

impl ChunkCacheManager {
    /// The pool's tag in [`ReservedArena::asleep`].
    pub const POOL_TAG: &'static str = Tenant::DEFAULT_TAG;

    /// Puts the whole pool to sleep: copies the stored pieces to host memory, and releases the memory of the
    /// pool's blocks. The pool's block IDs must belong to `arena`.
    ///
    /// Until [`wake_pool`](Self::wake_pool), every request gets [`Acquired::NoRoom`](crate::Acquired::NoRoom)
    /// and runs without the cache. Pieces keep their blocks, so addresses and an engine's block IDs stay
    /// valid. Pieces in a [`SleepStore`](crate::SleepStore) stay asleep.
    ///
    /// The call waits for `stream`. Work on other streams that touches the pool must have finished, such as
    /// the copies of a [`SleepStore`](crate::SleepStore) that uses another stream.
    ///
    /// # Errors
    /// The pool is unchanged if there is an error.
    ///
    /// - Returns [`Error::PoolInUse`], with the counts, while pieces are held, computed or moved.
    /// - Returns [`Error::PoolAsleep`] if the pool is already asleep.
    /// - Returns [`Error::PoolMoving`] if another thread is putting it to sleep or waking it.
    /// - Returns the errors of [`ReservedArena::sleep`].
    pub fn sleep_pool(&self, arena: &ReservedArena, stream: &dyn Stream) -> Result<PoolSleep> {
        let keep = self.fall()?;
        let slept = arena.sleep(Self::POOL_TAG, self.0.pool.blocks().range(), &keep, stream);
        let mut state = self.0.lock();
        match slept {
            Ok(asleep) => {
                let (released_bytes, saved_bytes) = (asleep.released_bytes(), asleep.saved_bytes());
                state.pool = PoolMemory::Asleep(asleep);
                Ok(PoolSleep { released_bytes, saved_bytes })
            }
            Err(error) => {
                state.pool = PoolMemory::Awake;
                Err(error.into())
            }
        }
    }

    /// Wakes the pool. All pieces are restored bit for bit, in the same blocks. Returns whether the pool was
    /// asleep. Waits for `stream`.
    ///
    /// # Errors
    /// Returns [`Error::PoolMoving`] if another thread is putting the pool to sleep or waking it. Returns the
    /// errors of [`kvcore::SleepingBlocks::wake`]; in that case the pool stays asleep.
    pub fn wake_pool(&self, stream: &dyn Stream) -> Result<bool> {
        let mut state = self.0.lock();
        let asleep = match std::mem::replace(&mut state.pool, PoolMemory::Moving) {
            PoolMemory::Asleep(asleep) => asleep,
            PoolMemory::Moving => return Err(Error::PoolMoving),
            PoolMemory::Awake => {
                state.pool = PoolMemory::Awake;
                return Ok(false);
            }
        };
        drop(state);
        let woken = asleep.wake(stream);
        let mut state = self.0.lock();
        match woken {
            Ok(()) => {
                state.pool = PoolMemory::Awake;
                Ok(true)
            }
            Err(rejected) => {
                state.pool = PoolMemory::Asleep(rejected.blocks);
                Err(rejected.error.into())
            }
        }
    }

    /// Returns whether the pool's blocks have memory. Returns false while the pool is being put to sleep or
    /// woken.
    pub fn is_pool_awake(&self) -> bool {
        self.0.lock().pool.is_awake()
    }

    /// Marks the pool as moving, and returns the blocks that contain pieces. Fails if the pool is in use.
    fn fall(&self) -> Result<Vec<BlockId>> {
        let mut state = self.0.lock();
        match state.pool {
            PoolMemory::Awake => {}
            PoolMemory::Moving => return Err(Error::PoolMoving),
            PoolMemory::Asleep(_) => return Err(Error::PoolAsleep),
        }
        let counts = self.0.pool.blocks().counts();
        let (held, flights, charged) = in_use(&state);
        let others = (counts.total - counts.free).saturating_sub(charged);
        if held + flights + others > 0 {
            return Err(Error::PoolInUse { held, flights, others });
        }
        state.pool = PoolMemory::Moving;
        let ids = state.index.iter().filter_map(|entry| match &entry.memory {
            PieceMemory::Awake(awake) => Some(awake.ids.iter().copied()),
            _ => None,
        });
        Ok(ids.flatten().collect())
    }
}

/// Returns the number of held pieces, the number of pieces that are being computed or moved, and the total
/// number of blocks in stored pieces and reservations.
fn in_use(state: &CacheState) -> (usize, usize, usize) {
    let entries = || state.index.iter();
    let held = entries().filter(|entry| entry.holders > 0).count();
    let moving = entries().filter(|entry| matches!(entry.memory, PieceMemory::Moving(_))).count();
    let charged: usize = state.accounts.iter().map(|account| account.used).sum();
    (held, state.under_way.len() + moving, charged - state.orphaned_blocks())
}
