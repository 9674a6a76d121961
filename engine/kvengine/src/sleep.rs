//! Sleep mode: whole pools release their memory while the engine is idle, and wake at the same addresses.

use std::fmt;

use kvchunk::ChunkCacheManager;
use kvcore::{PagedKvCache, ReservedArena, SleepingBlocks, Stream};
use serde::Serialize;

use crate::Engine;
use crate::caches::Caches;
use crate::error::{Error, Result};

/// A pool that can sleep as a whole, by its tag in [`ReservedArena::asleep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolTag {
    /// The pool of sequences and system prompts. Its cached contents are forgotten, as in vLLM.
    KvCache,
    /// The pool of chunks. The chunks are copied to host memory, and are found again bit for bit.
    ChunkCache,
}

impl PoolTag {
    /// Both pools.
    pub const ALL: [Self; 2] = [Self::KvCache, Self::ChunkCache];

    /// Returns the tag as a word: `kv_cache` or `chunk_cache`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvCache => "kv_cache",
            Self::ChunkCache => ChunkCacheManager::POOL_TAG,
        }
    }
}

impl fmt::Display for PoolTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The result of putting pools to sleep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Slept {
    /// The bytes of device memory that were released.
    pub released_bytes: usize,
    /// The bytes of host memory that hold chunks while they sleep.
    pub saved_bytes: usize,
}

/// The arena of an engine whose pools can sleep, with the main pool while that sleeps.
#[derive(Debug)]
pub(crate) struct SleepMode {
    reserved: ReservedArena,
    main: Option<SleepingBlocks>,
}

impl SleepMode {
    pub(crate) fn new(reserved: ReservedArena) -> Self {
        Self { reserved, main: None }
    }

    fn sleep(
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

    /// Wakes a pool. Returns true if it slept.
    fn wake(&mut self, tag: PoolTag, chunks: &ChunkCacheManager, stream: &dyn Stream) -> Result<bool> {
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

impl Engine {
    /// Puts whole pools to sleep and releases their device memory. Pools that are already asleep stay asleep. If a
    /// pool cannot sleep, the call wakes the pools that it has put to sleep.
    ///
    /// While the chunk pool sleeps, requests are answered without it. While the pool of sequences sleeps,
    /// [`generate`](Self::generate) returns [`Error::Asleep`].
    ///
    /// ```no_run
    /// # use kvengine::{Engine, PoolTag, Request};
    /// # fn idle(engine: &mut Engine, request: &Request) -> kvengine::Result<()> {
    /// let slept = engine.sleep(&PoolTag::ALL)?;
    /// println!("{} MiB are free for others", slept.released_bytes >> 20);
    /// engine.wake_up(&PoolTag::ALL)?;
    /// engine.generate(request, &mut ())?; // chunks are hits as before
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - Returns [`Error::NoSleepMode`] if [`enable_sleep_mode`](super::EngineConfig::enable_sleep_mode) is
    ///   not set.
    /// - Returns [`Error::InUse`] or [`kvchunk::Error::PoolInUse`], with the numbers, while blocks are held.
    /// - Returns the errors of [`ReservedArena::sleep`].
    pub fn sleep(&mut self, tags: &[PoolTag]) -> Result<Slept> {
        let mut all = Slept::default();
        let mut fallen: Vec<PoolTag> = Vec::new();
        for &tag in tags {
            if self.is_sleeping(tag) {
                continue;
            }
            match self.sleep_one(tag) {
                Ok(slept) => {
                    fallen.push(tag);
                    all.released_bytes += slept.released_bytes;
                    all.saved_bytes += slept.saved_bytes;
                }
                Err(error) => {
                    self.wake_up(&fallen)?;
                    return Err(error);
                }
            }
        }
        Ok(all)
    }

    /// Wakes pools. Chunks are found again, bit for bit and in the same blocks. Returns true if one of the
    /// pools slept.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Allocation`] if there is no memory, and the errors of the stream. In that
    /// case the pool stays asleep and can be woken later. Returns [`Error::NoSleepMode`] as
    /// [`sleep`](Self::sleep) does.
    pub fn wake_up(&mut self, tags: &[PoolTag]) -> Result<bool> {
        let mut slept = false;
        for &tag in tags {
            let Caches::Paged { chunks, mode: Some(mode), .. } = &mut self.caches else {
                return Err(NO_MODE);
            };
            slept |= mode.wake(tag, chunks, self.stream.as_ref())?;
        }
        Ok(slept)
    }

    /// Returns true if a pool sleeps.
    pub fn is_sleeping(&self, tag: PoolTag) -> bool {
        match (&self.caches, tag) {
            (Caches::Paged { mode, .. }, PoolTag::KvCache) => {
                mode.as_ref().is_some_and(|mode| mode.main.is_some())
            }
            (Caches::Paged { chunks, .. }, PoolTag::ChunkCache) => !chunks.is_pool_awake(),
            (Caches::Static(_) | Caches::Grouped(_), _) => false,
        }
    }

    fn sleep_one(&mut self, tag: PoolTag) -> Result<Slept> {
        let Caches::Paged { main, chunks, mode: Some(mode), .. } = &mut self.caches else {
            return Err(NO_MODE);
        };
        mode.sleep(tag, (main, chunks), self.stream.as_ref())
    }

    /// Checks that the pool of sequences is awake, which every request needs.
    pub(crate) fn check_awake(&self) -> Result<()> {
        if self.is_sleeping(PoolTag::KvCache) { Err(Error::Asleep(PoolTag::KvCache)) } else { Ok(()) }
    }
}

const NO_MODE: Error = Error::NoSleepMode("set enable_sleep_mode in its EngineConfig");
