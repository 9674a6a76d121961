//! Sleep mode: whole pools give their memory back while nobody asks anything, and wake at the same addresses.

use std::fmt;

use kvchunk::ChunkCacheManager;
use kvcore::{PagedKvCache, ReservedArena, SleepingBlocks, Stream};
use serde::Serialize;

use super::Engine;
use super::caches::Caches;
use crate::error::{Error, Result};

/// A pool that can sleep as a whole, by the tag that it has in [`ReservedArena::asleep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolTag {
    /// Sequences and system prompts. What is cached there is forgotten, as in vLLM.
    KvCache,
    /// Chunks. They are copied to host memory, and found again bit for bit.
    ChunkCache,
}

impl PoolTag {
    /// Both.
    pub const ALL: [Self; 2] = [Self::KvCache, Self::ChunkCache];

    /// The tag as a word: `kv_cache`, `chunk_cache`.
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

/// What putting pools to sleep brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Slept {
    /// Bytes of device memory that were released.
    pub released_bytes: usize,
    /// Bytes of host memory that hold chunks meanwhile.
    pub saved_bytes: usize,
}

/// The arena of an engine whose pools can sleep, and the main pool while it does.
#[derive(Debug)]
pub(super) struct SleepMode {
    reserved: ReservedArena,
    main: Option<SleepingBlocks>,
}

impl SleepMode {
    pub(super) fn new(reserved: ReservedArena) -> Self {
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

    /// Whether the pool slept.
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
    /// Puts whole pools to sleep: their device memory is released. Those that sleep already sleep on. All pools that
    /// were asked for sleep afterwards, or in case of an error none more than before.
    ///
    /// While the chunk pool sleeps, requests are answered without it. While that of sequences sleeps, none is:
    /// [`generate`](Self::generate) says so.
    ///
    /// ```no_run
    /// # use kvmodel::{Engine, PoolTag, Request};
    /// # fn idle(engine: &mut Engine, request: &Request) -> kvmodel::Result<()> {
    /// let slept = engine.sleep(&PoolTag::ALL)?;
    /// println!("{} MiB are free for others", slept.released_bytes >> 20);
    /// engine.wake_up(&PoolTag::ALL)?;
    /// engine.generate(request, &mut ())?; // chunks are hits as before
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoSleepMode`] for an engine without [`enable_sleep_mode`](super::EngineConfig::enable_sleep_mode);
    /// [`Error::InUse`] and [`kvchunk::Error::PoolInUse`] while blocks are held, with how many; those of
    /// [`ReservedArena::sleep`].
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

    /// Wakes pools: chunks are found again, bit for bit where they were. Returns whether one of them slept.
    ///
    /// # Errors
    /// [`kvcore::Error::Allocation`] when memory is refused, and what the stream refuses: what sleeps sleeps on, and
    /// may be woken later. [`Error::NoSleepMode`] as for [`sleep`](Self::sleep).
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

    /// Whether a pool sleeps.
    pub fn is_sleeping(&self, tag: PoolTag) -> bool {
        match (&self.caches, tag) {
            (Caches::Paged { mode, .. }, PoolTag::KvCache) => {
                mode.as_ref().is_some_and(|mode| mode.main.is_some())
            }
            (Caches::Paged { chunks, .. }, PoolTag::ChunkCache) => !chunks.is_pool_awake(),
            (Caches::Static(_), _) => false,
        }
    }

    fn sleep_one(&mut self, tag: PoolTag) -> Result<Slept> {
        let Caches::Paged { main, chunks, mode: Some(mode), .. } = &mut self.caches else {
            return Err(NO_MODE);
        };
        mode.sleep(tag, (main, chunks), self.stream.as_ref())
    }

    /// Requests need the pool of sequences.
    pub(super) fn check_awake(&self) -> Result<()> {
        if self.is_sleeping(PoolTag::KvCache) { Err(Error::Asleep(PoolTag::KvCache)) } else { Ok(()) }
    }
}

const NO_MODE: Error = Error::NoSleepMode("set enable_sleep_mode in its EngineConfig");
