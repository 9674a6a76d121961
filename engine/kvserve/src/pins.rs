//! Registered documents whose keys and values stay in memory as long as the documents are registered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvengine::{Engine, PinnedPrompt, PoolTag, Request};
use parking_lot::Mutex;
use tracing::{debug, info};

use crate::leisure::{LeisureJob, Place};
use crate::refusal::Refusal;
use crate::service::Service;

/// The share of the blocks for documents that may be pinned, by all tenants together.
const SHARE: f64 = 0.5;

/// The documents that are pinned.
#[derive(Debug)]
pub(crate) struct Pins {
    /// The largest number of blocks that a tenant may pin.
    most: usize,
    all: Mutex<Pinned>,
}

#[derive(Debug, Default)]
struct Pinned {
    documents: BTreeMap<Place, Pin>,
    /// The number of the next pin.
    next: u64,
    is_asleep: bool,
}

/// A document that was computed behind a system prompt.
#[derive(Debug)]
struct Pin {
    number: u64,
    text: Arc<str>,
    system: String,
    /// The request that computed it.
    request: Request,
    /// `None` while the caches are asleep.
    claim: Option<PinnedPrompt>,
}

/// The time for which a pin stays.
enum TimeLeft {
    /// The document is no longer registered with the text that is pinned, or another pin has replaced this one.
    Over,
    /// Until the document is removed.
    Unlimited,
    Limited(Duration),
}

impl Pins {
    /// Creates a list without documents, for a pool with this number of blocks for documents.
    pub(crate) fn new(blocks: usize, tenants: usize) -> Self {
        Self { most: (SHARE * blocks as f64) as usize / tenants.max(1), all: Mutex::default() }
    }

    /// Returns whether a tenant's document is pinned.
    pub(crate) fn contains(&self, tenant: Option<&Arc<str>>, id: &str) -> bool {
        let all = self.all.lock();
        all.documents.get(&(tenant.cloned(), id.to_owned())).is_some_and(|pin| pin.claim.is_some())
    }

    /// Pins a document that `request` has computed. Returns the number of the pin, or `None` if the document is not in the
    /// cache, or the tenant has pinned as much as it may. Runs on the engine's thread, so that the caches do not fall asleep
    /// in between.
    fn add(
        &self,
        engine: &Engine,
        place: Place,
        (text, system, request): (Arc<str>, String, Request),
    ) -> kvengine::Result<Option<u64>> {
        let claim = claim(engine, &request)?;
        let mut all = self.all.lock();
        if claim.is_none() && !all.is_asleep {
            return Ok(None);
        }
        let others = all.documents.iter().filter(|(other, _)| other.0 == place.0 && other.1 != place.1);
        let blocks = |claim: &Option<PinnedPrompt>| claim.as_ref().map_or(0, PinnedPrompt::document_blocks);
        let used: usize = others.map(|(_, pin)| blocks(&pin.claim)).sum();
        if used + blocks(&claim) > self.most {
            info!(id = place.1, "not pinned, because its tenant has pinned as much as it may");
            return Ok(None);
        }
        let number = all.next;
        all.next += 1;
        all.documents.insert(place, Pin { number, text, system, request, claim });
        Ok(Some(number))
    }

    /// Lets a document be evicted.
    pub(crate) fn remove(&self, tenant: Option<&Arc<str>>, id: &str) {
        self.all.lock().documents.remove(&(tenant.cloned(), id.to_owned()));
    }

    /// Lets a document be evicted if it is pinned with this number.
    fn remove_numbered(&self, place: &Place, number: u64) {
        let mut all = self.all.lock();
        if all.documents.get(place).is_some_and(|pin| pin.number == number) {
            all.documents.remove(place);
        }
    }

    /// Gives up all claims, puts the caches to sleep with `sleep`, and claims all documents again if that fails.
    pub(crate) fn fall_asleep<T, E>(
        &self,
        engine: &mut Engine,
        sleep: impl FnOnce(&mut Engine) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut all = self.all.lock();
        all.documents.values_mut().for_each(|pin| pin.claim = None);
        let slept = sleep(engine);
        all.is_asleep = engine.is_sleeping(PoolTag::ChunkCache);
        if slept.is_err() {
            all.claim_again(engine);
        }
        slept
    }

    /// Claims the documents again after the caches have woken. Returns those that have been lost.
    pub(crate) fn woken(&self, engine: &Engine) -> Vec<LeisureJob> {
        let mut all = self.all.lock();
        all.is_asleep = engine.is_sleeping(PoolTag::ChunkCache);
        all.claim_again(engine);
        all.take_lost()
    }

    /// Gives up all claims, for caches that are emptied by `empty`. Returns the documents to be computed again.
    pub(crate) fn emptied<T>(&self, empty: impl FnOnce() -> T) -> (T, Vec<LeisureJob>) {
        let mut all = self.all.lock();
        if all.is_asleep {
            return (empty(), Vec::new());
        }
        all.documents.values_mut().for_each(|pin| pin.claim = None);
        (empty(), all.take_lost())
    }
}

impl Pinned {
    fn claim_again(&mut self, engine: &Engine) {
        for pin in self.documents.values_mut().filter(|pin| pin.claim.is_none()) {
            pin.claim = claim(engine, &pin.request).unwrap_or_default();
        }
    }

    /// Takes out the documents without a claim, unless the caches are asleep.
    fn take_lost(&mut self) -> Vec<LeisureJob> {
        if self.is_asleep {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.documents).into_iter();
        let (kept, lost): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(|(_, pin)| pin.claim.is_some());
        self.documents = kept;
        lost.into_iter().map(|((tenant, id), pin)| LeisureJob { tenant, id, system: pin.system }).collect()
    }
}

/// Claims the document of a request, if it is in the cache.
fn claim(engine: &Engine, request: &Request) -> kvengine::Result<Option<PinnedPrompt>> {
    // The system prompt is soon computed again, and its blocks are those of all requests.
    let claim = engine.pin(request)?.documents_only();
    Ok((claim.document_tokens() > 0).then_some(claim))
}

impl Service {
    /// Pins a document that `request` has computed behind a system prompt, until it is no longer registered with this text.
    ///
    /// # Errors
    /// Refuses if the engine does.
    pub(crate) async fn pin(
        self: &Arc<Self>,
        job: LeisureJob,
        text: Arc<str>,
        request: Request,
    ) -> Result<(), Refusal> {
        let LeisureJob { tenant, id, system } = job;
        let (service, place) = (Arc::clone(self), (tenant, id));
        let new = (place.clone(), (text, system, request));
        let added = self.engine.call(move |engine| service.pins.add(engine, new.0, new.1)).await??;
        if let Some(number) = added {
            debug!(id = place.1, "pinned a registered document");
            self.unpin_in_time(place, number);
        }
        Ok(())
    }

    /// Unpins a document once it has expired, or now if it has been removed or replaced since it was computed.
    fn unpin_in_time(self: &Arc<Self>, place: Place, number: u64) {
        let left = match self.time_left(&place, number) {
            TimeLeft::Over => return self.pins.remove_numbered(&place, number),
            TimeLeft::Unlimited => return,
            TimeLeft::Limited(left) => left,
        };
        let service = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(left + Duration::from_millis(1)).await;
            if let Some(service) = service.upgrade() {
                // It may have been registered for longer in the meantime.
                service.unpin_in_time(place, number);
            }
        });
    }

    /// Returns how long the pin of a document with this number stays.
    fn time_left(&self, place: &Place, number: u64) -> TimeLeft {
        let (library, now) = (self.libraries.of(place.0.as_ref()), self.libraries.now());
        let mut library = library.lock();
        let Some(document) = library.get(&place.1) else { return TimeLeft::Over };
        let all = self.pins.all.lock();
        let pin = all.documents.get(place);
        if pin.is_none_or(|pin| pin.number != number || pin.text != document.text) {
            return TimeLeft::Over;
        }
        let left = document.expires.map(|at| Duration::from_millis(at.saturating_sub(now)));
        left.map_or(TimeLeft::Unlimited, TimeLeft::Limited)
    }

    /// Runs work on the engine's thread while no registered document is computed, and to its end even if its caller goes
    /// away. Then computes the documents that it returns, at leisure.
    pub(crate) async fn undisturbed<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Pins, &mut Engine) -> (R, Vec<LeisureJob>) + Send + 'static,
    ) -> Result<R, Refusal> {
        let service = Arc::clone(self);
        let done = tokio::spawn(async move {
            service.leisure.pause().await;
            let pinning = Arc::clone(&service);
            let done = service.engine.call(move |engine| work(&pinning.pins, engine)).await;
            service.leisure.resume();
            let (result, lost) = done?;
            service.pin_at_leisure(lost);
            Ok(result)
        });
        done.await.map_err(|_| Refusal::engine_gone())?
    }

    /// Returns whether the caches for documents are asleep, as far as the pins know.
    pub(crate) fn is_asleep(&self) -> bool {
        self.pins.all.lock().is_asleep
    }
}
