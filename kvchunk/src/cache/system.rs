//! Single flight for system prompts: if several requests miss the same system prompt at once, only one of
//! them computes it.

use std::sync::Arc;

use kvcore::{BlockKey, KvPool};

use super::flight::{ChunkWaiter, Flight};
use super::{ChunkCacheManager, SharedCache};
use crate::error::Result;
use crate::prefix::PrefixFill;

/// The outcome of looking up a system prompt.
#[derive(Debug)]
pub(crate) enum SystemFound {
    /// The cached part of the system prompt, and room for the rest.
    Filled(Box<SystemFill>),
    /// Another request is computing the system prompt with this key.
    Busy(BlockKey, ChunkWaiter),
}

/// A system prompt that a request has partly found.
#[derive(Debug)]
pub(crate) struct SystemFill {
    pub(crate) prefix: PrefixFill,
    /// The flight that other requests wait for until it is dropped. `None` if they do not wait.
    pub(crate) flight: Option<SystemFlight>,
}

impl From<PrefixFill> for SystemFound {
    /// Creates a value without a flight, so that other requests do not wait for the missing part.
    fn from(prefix: PrefixFill) -> Self {
        Self::Filled(Box::new(SystemFill { prefix, flight: None }))
    }
}

/// A system prompt that this request is computing. Other requests wait for it until this value is dropped.
#[derive(Debug)]
pub(crate) struct SystemFlight {
    cache: Arc<SharedCache>,
    key: BlockKey,
    flight: Arc<Flight>,
}

impl Drop for SystemFlight {
    fn drop(&mut self) {
        self.cache.systems.lock().remove(&self.key);
        self.flight.land();
    }
}

impl ChunkCacheManager {
    /// Finds the cached part of a system prompt in `main`, and allocates blocks for the rest, unless another
    /// request is computing the same system prompt.
    ///
    /// # Errors
    /// Returns the errors of [`PrefixFill::new`].
    pub(crate) fn fill_system(&self, main: &KvPool, root: BlockKey, tokens: &[u32]) -> Result<SystemFound> {
        let mut systems = self.0.systems.lock();
        // Check this before making room, because making room may evict cached blocks.
        if !systems.is_empty()
            && let Some(key) = root.chain(tokens, main.block_size()).last()
            && let Some(flight) = systems.get(key)
        {
            return Ok(SystemFound::Busy(*key, ChunkWaiter(Arc::clone(flight))));
        }
        let prefix = PrefixFill::new(main, Some(root), tokens)?;
        let missing = prefix.key().filter(|_| prefix.cached() < tokens.len());
        let flight = missing.map(|key| {
            let flight: Arc<Flight> = Arc::default();
            systems.insert(key, Arc::clone(&flight));
            SystemFlight { cache: Arc::clone(&self.0), key, flight }
        });
        Ok(SystemFound::Filled(Box::new(SystemFill { prefix, flight })))
    }
}
