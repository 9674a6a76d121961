//! Registered documents whose keys and values stay in memory as long as the documents are registered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::ChunkedPrompt;
use kvengine::{Engine, PinnedPrompt, PoolTag, PromptTokens, Request};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{debug, info};

use crate::leisure::{LeisureJob, Place};
use crate::prompt::PartName;
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
    copy: DocumentCopy,
    /// `None` while the caches are asleep.
    claim: Option<PinnedPrompt>,
}

/// A document with the beginning behind which it was computed.
#[derive(Debug)]
pub(crate) struct DocumentCopy {
    pub(crate) text: Arc<str>,
    /// The system prompt with which the document was registered. `None` for the beginning of a prompt that contained it.
    pub(crate) system: Option<String>,
    /// A request whose only document it is.
    pub(crate) request: Request,
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

    /// Pins a copy of a document, in place of an earlier one. Returns the number of the pin if it is a new one. Pins nothing
    /// if the document is not in the cache, or if its tenant has pinned as much as it may. Runs on the engine's thread, so
    /// that the caches do not fall asleep in between.
    fn add(&self, engine: &Engine, place: Place, copy: DocumentCopy) -> kvengine::Result<Option<u64>> {
        let claim = claim(engine, &copy.request)?;
        let mut all = self.all.lock();
        // The copy of a prompt is in the cache now, or soon computed by another prompt.
        if claim.is_none() && (copy.system.is_none() || !all.is_asleep) {
            return Ok(None);
        }
        let old = all.documents.get(&place);
        if copy.system.is_none() && old.is_some_and(|pin| pin.copy.system.is_some()) {
            return Ok(None);
        }
        if !all.make_room(&place, blocks(claim.as_ref()), copy.system.is_some(), self.most) {
            debug!(id = place.1, "not pinned, because its tenant has pinned as much as it may");
            return Ok(None);
        }
        let old = all.documents.get(&place).filter(|pin| pin.copy.text == copy.text).map(|pin| pin.number);
        let number = old.unwrap_or(all.next);
        all.next = all.next.max(number + 1);
        all.documents.insert(place, Pin { number, copy, claim });
        // The pin that it replaces is already unpinned in time.
        Ok(old.is_none().then_some(number))
    }

    /// Returns whether a document should be pinned as it stands in a prompt behind the tokens `before`, where it takes so
    /// many blocks.
    fn wants(&self, place: &Place, before: &[u32], blocks: usize) -> bool {
        let all = self.all.lock();
        let is_there = |pin: &Pin| {
            let same = chunked(&pin.copy.request).is_some_and(|prompt| prompt.system() == before);
            pin.copy.system.is_some() || (same && pin.claim.is_some())
        };
        !all.documents.get(place).is_some_and(is_there) && all.used_beside(place, false) + blocks <= self.most
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
    /// Returns the number of blocks that a tenant has pinned for other documents, or for those alone that were registered
    /// with a system prompt.
    fn used_beside(&self, place: &Place, with_system: bool) -> usize {
        let others = self.documents.iter().filter(|(other, _)| other.0 == place.0 && other.1 != place.1);
        let counted = others.filter(|(_, pin)| !with_system || pin.copy.system.is_some());
        counted.map(|(_, pin)| blocks(pin.claim.as_ref())).sum()
    }

    /// Makes room for a document, so that its tenant has pinned at most `most` blocks. Documents without a system prompt
    /// give way to one with a system prompt, those first that were pinned first. Returns false if there is no room.
    // Decision: docs/decisions/serve.md#a-document-without-a-system-prompt-is-pinned-where-it-was-used-last
    fn make_room(&mut self, place: &Place, blocks: usize, with_system: bool, most: usize) -> bool {
        if self.used_beside(place, with_system) + blocks > most {
            return false;
        }
        while self.used_beside(place, false) + blocks > most {
            let gives_way = |(other, pin): &(&Place, &Pin)| {
                other.0 == place.0 && *other != place && pin.copy.system.is_none()
            };
            let first = self.documents.iter().filter(gives_way).min_by_key(|(_, pin)| pin.number);
            let Some(first) = first.map(|(other, _)| other.clone()) else { return false };
            self.documents.remove(&first);
        }
        true
    }

    fn claim_again(&mut self, engine: &Engine) {
        for pin in self.documents.values_mut().filter(|pin| pin.claim.is_none()) {
            pin.claim = claim(engine, &pin.copy.request).unwrap_or_default();
        }
    }

    /// Takes out the documents without a claim, unless the caches are asleep. Returns those that were registered with a
    /// system prompt; the next prompt that contains one of the others computes it.
    fn take_lost(&mut self) -> Vec<LeisureJob> {
        if self.is_asleep {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.documents).into_iter();
        let (kept, lost): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(|(_, pin)| pin.claim.is_some());
        self.documents = kept;
        let job =
            |((tenant, id), pin): (Place, Pin)| Some(LeisureJob { tenant, id, system: pin.copy.system? });
        lost.into_iter().filter_map(job).collect()
    }
}

/// Returns the prompt of a request if it is one in parts.
fn chunked(request: &Request) -> Option<&ChunkedPrompt> {
    match &*request.prompt {
        PromptTokens::Chunked(prompt) => Some(prompt),
        PromptTokens::Plain(_) => None,
    }
}

fn blocks(claim: Option<&PinnedPrompt>) -> usize {
    claim.map_or(0, PinnedPrompt::document_blocks)
}

/// Claims the document of a request, if it is in the cache.
fn claim(engine: &Engine, request: &Request) -> kvengine::Result<Option<PinnedPrompt>> {
    // The system prompt is soon computed again, and its blocks are those of all requests.
    let claim = engine.pin(request)?.documents_only();
    Ok((claim.document_tokens() > 0).then_some(claim))
}

impl Service {
    /// Pins copies of documents, each until it is no longer registered with this text.
    ///
    /// # Errors
    /// Refuses if the engine does.
    pub(crate) async fn pin(self: &Arc<Self>, copies: Vec<(Place, DocumentCopy)>) -> Result<(), Refusal> {
        let service = Arc::clone(self);
        let add = move |engine: &mut Engine| -> kvengine::Result<Vec<(Place, u64)>> {
            let mut added = Vec::new();
            for (place, copy) in copies {
                if let Some(number) = service.pins.add(engine, place.clone(), copy)? {
                    added.push((place, number));
                }
            }
            Ok(added)
        };
        for (place, number) in self.engine.call(add).await?? {
            debug!(id = place.1, "pinned a registered document");
            self.unpin_in_time(place, number);
        }
        Ok(())
    }

    /// Pins the registered documents of a request, once the returned sender says that they are in the cache. Those that
    /// were registered with a system prompt stay pinned behind it. Documents of a request with a salt are not pinned,
    /// because only requests with this salt find them.
    pub(crate) fn pin_used(
        self: &Arc<Self>,
        request: &Request,
        documents: &[(PartName, usize)],
    ) -> Option<oneshot::Sender<()>> {
        let prompt = chunked(request).filter(|_| request.cache_salt.is_none())?;
        let tenant: Option<Arc<str>> = request.tenant.as_deref().map(Into::into);
        let copy = |((name, tokens), chunk): (&(PartName, usize), &Vec<u32>)| {
            let (text, place) = (Arc::clone(name.registered.as_ref()?), (tenant.clone(), name.id.clone()));
            if !self.pins.wants(&place, prompt.system(), self.block.of_tokens(*tokens)) {
                return None;
            }
            // Of the question, nothing is pinned.
            let question = prompt.question().get(..1)?.to_vec();
            let alone = ChunkedPrompt::new(prompt.system().to_vec(), vec![chunk.clone()], question).ok()?;
            let alone = alone.with_decoys(Arc::clone(prompt.decoys())).ok()?;
            let request = Request { prompt: Arc::new(PromptTokens::Chunked(alone)), ..request.clone() };
            Some((place, DocumentCopy { text, system: None, request }))
        };
        let copies: Vec<_> = documents.iter().zip(prompt.chunks()).filter_map(copy).collect();
        if copies.is_empty() {
            return None;
        }
        let (sender, computed) = oneshot::channel();
        let service = Arc::clone(self);
        tokio::spawn(async move {
            if computed.await.is_ok()
                && let Err(refusal) = service.pin(copies).await
            {
                info!(reason = refusal.message, "the registered documents of a request are not pinned");
            }
        });
        Some(sender)
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
        if pin.is_none_or(|pin| pin.number != number || pin.copy.text != document.text) {
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
