//! Sleep mode: whole pools release their memory while the engine is idle, and wake at the same addresses.

use kvchunk::ChunkCacheManager;
use kvcore::{PagedKvCache, ReservedArena, SleepingBlocks, Stream};
use serde::Serialize;

use crate::config::PoolTag;
use crate::error::{Error, Result};

/// The amounts of memory that putting pools to sleep has released and used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Slept {
    /// The amount of device memory that was released, in bytes.
    pub released_bytes: usize,
    /// The amount of host memory that holds chunks while they sleep, in bytes.
    pub saved_bytes: usize,
}

/// The arena whose pools can sleep, and the main pool's blocks while this pool is asleep.
#[derive(Debug)]
pub(super) struct SleepMode {
    reserved: ReservedArena,
    main: Option<SleepingBlocks>,
}

impl SleepMode {
    pub(super) fn new(reserved: ReservedArena) -> Self {
        Self { reserved, main: None }
    }

    /// Puts a pool to sleep.
    pub(super) fn sleep(
        &mut self,
        tag: PoolTag,
        (main, chunks): (&PagedKvCache, &ChunkCacheManager),
        stream: &dyn Stream,
    ) -> Result<Slept> {
        match tag {
            PoolTag::ChunkCache => {
                let kvchunk::PoolSleep { released_bytes, saved_bytes } =
                    chunks.sleep_pool(&self.reserved, stream)?;
                Ok(Slept { released_bytes, saved_bytes })
            }
            PoolTag::KvCache => {
                let pool = main.pool();
                let counts = pool.counts();
                let held = counts.total - counts.free - counts.cached;
                if held > 0 {
                    return Err(Error::InUse { pool: tag, held });
                }
                pool.clear_cached();
                let asleep = self.reserved.sleep(tag.name(), pool.range(), &[], stream)?;
                let slept =
                    Slept { released_bytes: asleep.released_bytes(), saved_bytes: asleep.saved_bytes() };
                self.main = Some(asleep);
                Ok(slept)
            }
        }
    }

    /// Returns true if the main pool is asleep.
    pub(super) fn main_sleeps(&self) -> bool {
        self.main.is_some()
    }

    /// Wakes a pool. Returns true if it was asleep.
    pub(super) fn wake(
        &mut self,
        tag: PoolTag,
        chunks: &ChunkCacheManager,
        stream: &dyn Stream,
    ) -> Result<bool> {
        match tag {
            PoolTag::ChunkCache => Ok(chunks.wake_pool(stream)?),
            PoolTag::KvCache => match self.main.take().map(|asleep| asleep.wake(stream)) {
                None => Ok(false),
                Some(Ok(())) => Ok(true),
                Some(Err(rejected)) => {
                    self.main = Some(rejected.blocks);
                    Err(rejected.error.into())
                }
            },
        }
    }
}
