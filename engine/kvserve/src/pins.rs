//! Registered documents whose keys and values stay in memory as long as the documents are registered.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kvchunk::PositionPlan;
use kvengine::{Engine, PinnedPrompt, PoolTag, Request};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{debug, info};

use crate::beginning::{Beginning, Frequencies, chunked, longest, only_keys, plan};
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
    frequencies: Frequencies,
    all: Mutex<Pinned>,
}

#[derive(Debug, Default)]
struct Pinned {
    documents: BTreeMap<Place, Pin>,
    /// The number of the next pin or use.
    next: u64,
    is_asleep: bool,
}

/// A document that was computed behind the beginning of a prompt.
#[derive(Debug)]
struct Pin {
    number: u64,
    /// The number of the last use.
    used: u64,
    /// The text that was registered, by which a registration is recognised.
    text: Arc<str>,
    /// The system prompt with which the document was registered. `None` for the beginning of a prompt that contained it.
    system: Option<String>,
    beginning: Arc<Beginning>,
    tokens: Vec<u32>,
    /// The position for which the keys are stored.
    stored_start: i64,
    /// `None` while the caches are asleep.
    claim: Option<PinnedPrompt>,
}

/// Documents of a prompt that are to be pinned.
#[derive(Debug)]
pub(crate) struct Copies {
    /// A request for the prompt, which the engine has computed.
    request: Request,
    /// The system prompt with which the documents were registered. `None` for the beginning of a prompt that contained them.
    system: Option<String>,
    documents: Vec<Copied>,
}

/// A document of a prompt.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) place: Place,
    pub(crate) text: Arc<str>,
    /// The index of its chunk in the prompt.
    pub(crate) chunk: usize,
}

/// The time for which a pin stays.
enum TimeLeft {
    /// The document is no longer registered with the text that is pinned, or another pin has replaced this one.
    Over,
    /// Until the document is removed.
    Unlimited,
    Limited(Duration),
}

impl Copies {
    /// Creates a list of documents of one tenant in the prompt of a request, of which they keep the tokens and the settings
    /// that keys depend on.
    pub(crate) fn new(request: &Request, system: Option<String>, documents: Vec<Copied>) -> Self {
        Self { request: only_keys(request, Arc::clone(&request.prompt)), system, documents }
    }

    /// Returns the pins of the documents, with the claims on the chunks of the prompt.
    fn pins(self, claims: Vec<PinnedPrompt>) -> Vec<(Place, Pin)> {
        let Some(prompt) = chunked(&self.request) else { return Vec::new() };
        let Some(beginning) = Beginning::of(&self.request).map(Arc::new) else { return Vec::new() };
        let Some(plan) = plan(&self.request) else { return Vec::new() };
        let mut claims: Vec<_> = claims.into_iter().map(Some).collect();
        let pin = |copied: Copied| {
            let claim = claims.get_mut(copied.chunk).and_then(Option::take);
            let pin = Pin {
                number: 0,
                used: 0,
                text: copied.text,
                system: self.system.clone(),
                beginning: Arc::clone(&beginning),
                tokens: prompt.chunks().get(copied.chunk)?.clone(),
                stored_start: stored_start(&plan, copied.chunk)?,
                claim: claim.filter(|claim| claim.document_tokens() > 0),
            };
            Some((copied.place, pin))
        };
        self.documents.into_iter().filter_map(pin).collect()
    }
}

impl Pins {
    /// Creates a list without documents, for a pool with this number of blocks for documents and a model with these
    /// frequencies.
    pub(crate) fn new(blocks: usize, tenants: usize, frequencies: Frequencies) -> Self {
        let most = (SHARE * blocks as f64) as usize / tenants.max(1);
        Self { most, frequencies, all: Mutex::default() }
    }

    /// Returns whether a tenant's document is pinned.
    pub(crate) fn contains(&self, tenant: Option<&Arc<str>>, id: &str) -> bool {
        let all = self.all.lock();
        all.documents.get(&(tenant.cloned(), id.to_owned())).is_some_and(|pin| pin.claim.is_some())
    }

    /// Pins documents of a prompt, in place of earlier copies. Returns the places and numbers of the new pins. Pins no
    /// document that is not in the cache, nor more than the tenant may pin. Runs on the engine's thread, so that the
    /// caches do not fall asleep in between.
    fn add(&self, engine: &Engine, copies: Copies) -> kvengine::Result<Vec<(Place, u64)>> {
        let pins = {
            // The system prompt is soon computed again, and its blocks are those of all requests.
            let claims = engine.pin(&copies.request)?.into_documents();
            copies.pins(claims)
        };
        Ok(self.all.lock().add(pins, self.most))
    }

    /// Returns those documents that should be pinned as they stand in the prompt of a request, where each takes so many
    /// blocks. Notes the use of those that are pinned like that. All are a tenant's, and have room together.
    fn wanted(
        &self,
        tenant: Option<&Arc<str>>,
        request: &Request,
        documents: Vec<(Copied, usize)>,
    ) -> Vec<Copied> {
        let (Some(prompt), Some(plan)) = (chunked(request), plan(request)) else { return Vec::new() };
        let longest = longest(&plan, request.max_new_tokens);
        let mut all = self.all.lock();
        let used = all.count();
        let with_system = all.of_tenant(tenant).filter(|(_, pin)| pin.system.is_some());
        let taken: usize = with_system.map(|(_, pin)| pin.blocks()).sum();
        let mut room = self.most.saturating_sub(taken);
        // Documents of a prompt have the same beginning, which may be long.
        let mut is_same: HashMap<*const Beginning, bool> = HashMap::new();
        let mut seen = BTreeSet::new();
        let mut missing = Vec::new();
        for (copied, blocks) in documents {
            if !seen.insert(copied.place.clone()) {
                continue;
            }
            match all.documents.get_mut(&copied.place) {
                Some(pin) if pin.system.is_some() => {}
                Some(pin)
                    if pin.claim.is_some()
                        && Arc::ptr_eq(&pin.text, &copied.text)
                        && Some(pin.stored_start) == stored_start(&plan, copied.chunk)
                        && *is_same.entry(Arc::as_ptr(&pin.beginning)).or_insert_with(|| {
                            pin.beginning.tokens() == prompt.system()
                                && self.frequencies.are_same(pin.beginning.longest(), longest)
                        }) =>
                {
                    pin.used = used;
                    room = room.saturating_sub(pin.blocks());
                }
                _ => missing.push((copied, blocks)),
            }
        }
        let mut fits = |blocks: usize| {
            let left = room.checked_sub(blocks);
            room = left.unwrap_or(room);
            left.is_some()
        };
        missing.into_iter().filter_map(|(copied, blocks)| fits(blocks).then_some(copied)).collect()
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
            all.claim_again(engine, self.most);
        }
        slept
    }

    /// Claims the documents again after the caches have woken. Returns those that have been lost.
    pub(crate) fn woken(&self, engine: &Engine) -> Vec<LeisureJob> {
        let mut all = self.all.lock();
        all.is_asleep = engine.is_sleeping(PoolTag::ChunkCache);
        all.claim_again(engine, self.most);
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

/// Returns the position for which the keys of a chunk are stored.
fn stored_start(plan: &PositionPlan, chunk: usize) -> Option<i64> {
    plan.chunks.get(chunk).map(|place| place.stored_start)
}

impl Pin {
    fn blocks(&self) -> usize {
        self.claim.as_ref().map_or(0, PinnedPrompt::document_blocks)
    }
}

impl Pinned {
    /// Returns the next number.
    fn count(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns the pins of a tenant.
    fn of_tenant(&self, tenant: Option<&Arc<str>>) -> impl Iterator<Item = (&Place, &Pin)> {
        let first = (tenant.cloned(), String::new());
        self.documents.range(first..).take_while(move |(place, _)| place.0.as_ref() == tenant)
    }

    /// Adds pins of one tenant, in place of earlier ones, up to `most` blocks of the tenant. Documents without a system
    /// prompt give way, those first whose last use is longest ago. Returns the places and numbers of the pins whose
    /// documents had none.
    // Decision: docs/decisions/serve.md#a-document-without-a-system-prompt-is-pinned-where-it-was-used-last
    fn add(&mut self, mut pins: Vec<(Place, Pin)>, most: usize) -> Vec<(Place, u64)> {
        pins.retain(|(place, pin)| {
            // The copy of a prompt is in the cache now, or soon computed by another prompt.
            let is_there = pin.claim.is_some() || (pin.system.is_some() && self.is_asleep);
            let old = self.documents.get(place);
            is_there && (pin.system.is_some() || old.is_none_or(|old| old.system.is_none()))
        });
        let Some(((tenant, _), _)) = pins.first() else { return Vec::new() };
        let replaced: BTreeSet<&Place> = pins.iter().map(|(place, _)| place).collect();
        let others = self.of_tenant(tenant.as_ref()).filter(|(place, _)| !replaced.contains(place));
        let (staying, mut going): (Vec<_>, Vec<_>) = others.partition(|(_, pin)| pin.system.is_some());
        let blocks = |pins: &[(&Place, &Pin)]| pins.iter().map(|(_, pin)| pin.blocks()).sum::<usize>();
        let (mut taken, mut room) = (blocks(&going), most.saturating_sub(blocks(&staying)));
        going.sort_unstable_by_key(|(_, pin)| pin.used);
        let going: Vec<_> = going.into_iter().map(|(place, pin)| (place.clone(), pin.blocks())).collect();
        let (used, mut added) = (self.count(), Vec::new());
        for (place, mut pin) in pins {
            let old = self.documents.remove(&place).filter(|old| Arc::ptr_eq(&old.text, &pin.text));
            if pin.blocks() > room {
                debug!(id = place.1, "not pinned, because its tenant has pinned as much as it may");
                continue;
            }
            room -= pin.blocks();
            pin.used = used;
            // The pin that it replaces is already unpinned in time.
            pin.number = old.as_ref().map_or_else(|| self.count(), |old| old.number);
            if old.is_none() {
                added.push((place.clone(), pin.number));
            }
            self.documents.insert(place, pin);
        }
        for (place, blocks) in going {
            if taken <= room {
                break;
            }
            taken -= blocks;
            self.documents.remove(&place);
        }
        added
    }

    /// Claims again what is not claimed, up to `most` blocks of each tenant. Leaves out a document that stands at another
    /// position now that others of its prompt are gone, because the copy there is another one.
    fn claim_again(&mut self, engine: &Engine, most: usize) {
        let mut prompts: HashMap<*const Beginning, Vec<&mut Pin>> = HashMap::new();
        for pin in self.documents.values_mut().filter(|pin| pin.claim.is_none()) {
            prompts.entry(Arc::as_ptr(&pin.beginning)).or_default().push(pin);
        }
        for mut pins in prompts.into_values() {
            pins.sort_by_key(|pin| pin.stored_start);
            let Some(beginning) = pins.first().map(|pin| Arc::clone(&pin.beginning)) else { continue };
            let request = beginning.request(pins.iter().map(|pin| pin.tokens.clone()).collect());
            let Ok(request) = request else { continue };
            let Some(plan) = plan(&request) else { continue };
            let claims = engine.pin(&request).map(PinnedPrompt::into_documents).unwrap_or_default();
            for (chunk, (pin, claim)) in pins.into_iter().zip(claims).enumerate() {
                let is_the_copy = stored_start(&plan, chunk) == Some(pin.stored_start);
                pin.claim = Some(claim).filter(|claim| is_the_copy && claim.document_tokens() > 0);
            }
        }
        // A document that was computed before the caches fell asleep may have been added since.
        let mut taken: HashMap<Option<Arc<str>>, usize> = HashMap::new();
        let mut pins: Vec<_> = self.documents.iter_mut().collect();
        pins.sort_unstable_by_key(|(_, pin)| (pin.system.is_none(), Reverse(pin.used)));
        for ((tenant, _), pin) in pins {
            let (taken, blocks) = (taken.entry(tenant.clone()).or_default(), pin.blocks());
            if *taken + blocks <= most {
                *taken += blocks;
            } else {
                pin.claim = None;
            }
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
        let job = |((tenant, id), pin): (Place, Pin)| {
            Some(LeisureJob { tenant, id, system: pin.system?, text: pin.text })
        };
        lost.into_iter().filter_map(job).collect()
    }
}

impl Service {
    /// Pins documents of a prompt, each until it is no longer registered with this text.
    ///
    /// # Errors
    /// Refuses if the engine does.
    pub(crate) async fn pin(self: &Arc<Self>, copies: Copies) -> Result<(), Refusal> {
        let service = Arc::clone(self);
        let add = move |engine: &mut Engine| service.pins.add(engine, copies);
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
        if request.cache_salt.is_some() || chunked(request).is_none() {
            return None;
        }
        let tenant: Option<Arc<str>> = request.tenant.as_deref().map(Into::into);
        let copied = |(chunk, (name, tokens)): (usize, &(PartName, usize))| {
            let (text, place) = (Arc::clone(name.registered.as_ref()?), (tenant.clone(), name.id.clone()));
            Some((Copied { place, text, chunk }, self.block.of_tokens(*tokens)))
        };
        let registered = documents.iter().enumerate().filter_map(copied).collect();
        let wanted = self.pins.wanted(tenant.as_ref(), request, registered);
        if wanted.is_empty() {
            return None;
        }
        let copies = Copies::new(request, None, wanted);
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
        if pin.is_none_or(|pin| pin.number != number || !Arc::ptr_eq(&pin.text, &document.text)) {
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

#[cfg(test)]
mod tests {
    use kvchunk::ChunkedPrompt;
    use kvengine::PromptTokens;

    use super::*;

    #[test]
    fn documents_of_a_prompt_share_its_beginning_and_have_room_together() {
        let (before, chunks): (Vec<u32>, _) = ((0..10_000).collect(), vec![vec![1, 2]; 50]);
        let prompt = ChunkedPrompt::new(before.clone(), chunks, vec![3]).unwrap();
        let request = Request::new(PromptTokens::Chunked(prompt));
        let pins = Pins::new(40, 2, Frequencies::default());
        let copied = |chunk: usize| Copied { place: (None, chunk.to_string()), text: "a".into(), chunk };
        // The first one stands in the prompt twice.
        let documents = [0].into_iter().chain(0..50).map(|chunk| (copied(chunk), 3)).collect();
        let wanted = pins.wanted(None, &request, documents);
        assert_eq!(wanted.iter().map(|one| one.chunk).collect::<Vec<_>>(), [0, 1, 2], "up to 10 blocks");
        let copies = Copies::new(&request, None, wanted);
        assert!(
            Arc::ptr_eq(&copies.request.prompt, &request.prompt),
            "tokens are copied before they are pinned"
        );
        let all = copies.pins(Vec::new());
        drop(request);
        let beginning = Arc::clone(&all[0].1.beginning);
        assert_eq!((all.len(), beginning.tokens()), (3, before.as_slice()));
        assert!(all.iter().all(|(_, pin)| Arc::ptr_eq(&pin.beginning, &beginning) && pin.tokens == [1, 2]));
    }
}
