//! Registered documents whose keys and values stay in memory as long as the documents are registered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvengine::{PinnedPrompt, Request};
use parking_lot::Mutex;
use tracing::{debug, info};

use crate::leisure::LeisureJob;
use crate::refusal::Refusal;
use crate::service::Service;

/// The share of the blocks for documents that may be pinned, by all tenants together.
const SHARE: f64 = 0.5;

/// A tenant's document: the tag of the tenant, and the ID.
type Place = (Option<Arc<str>>, String);

/// The documents that are pinned.
#[derive(Debug)]
pub(crate) struct Pins {
    /// The largest number of blocks that a tenant may pin.
    most: usize,
    all: Mutex<BTreeMap<Place, Pin>>,
    /// The documents that were pinned when the caches fell asleep.
    asleep: Mutex<Vec<LeisureJob>>,
}

#[derive(Debug)]
struct Pin {
    text: Arc<str>,
    /// The system prompt behind which the document was computed.
    system: String,
    pinned: PinnedPrompt,
}

impl Pins {
    /// Creates a list without documents, for a pool with this number of blocks for documents.
    pub(crate) fn new(blocks: usize, tenants: usize) -> Self {
        let most = (SHARE * blocks as f64) as usize / tenants.max(1);
        Self { most, all: Mutex::default(), asleep: Mutex::default() }
    }

    /// Returns whether a tenant's document is pinned.
    pub(crate) fn contains(&self, tenant: Option<&Arc<str>>, id: &str) -> bool {
        self.all.lock().contains_key(&(tenant.cloned(), id.to_owned()))
    }

    /// Adds a document. Returns false, and pins nothing, if the tenant has pinned as much as it may.
    fn add(&self, place: Place, pin: Pin) -> bool {
        let mut all = self.all.lock();
        let of_tenant = all.iter().filter(|(other, _)| other.0 == place.0 && other.1 != place.1);
        let used: usize = of_tenant.map(|(_, pin)| pin.pinned.document_blocks()).sum();
        if used + pin.pinned.document_blocks() > self.most {
            return false;
        }
        let replaced = all.insert(place, pin);
        drop(all);
        drop(replaced);
        true
    }

    /// Lets a document be evicted.
    pub(crate) fn remove(&self, tenant: Option<&Arc<str>>, id: &str) {
        let removed = self.all.lock().remove(&(tenant.cloned(), id.to_owned()));
        drop(removed);
    }

    /// Lets all documents be evicted. Returns the work that pins them again.
    fn take(&self) -> Vec<LeisureJob> {
        let all = std::mem::take(&mut *self.all.lock());
        all.into_iter().map(|((tenant, id), pin)| LeisureJob { tenant, id, system: pin.system }).collect()
    }
}

impl Service {
    /// Pins a document that `request` has computed behind `system`, until it is no longer registered with this text.
    ///
    /// # Errors
    /// Refuses if the engine does.
    pub(crate) async fn pin(
        self: &Arc<Self>,
        job: LeisureJob,
        text: Arc<str>,
        request: Request,
    ) -> Result<(), Refusal> {
        let pinned = self.engine.call(move |engine| engine.pin(&request)).await??;
        if pinned.document_tokens() == 0 {
            return Ok(());
        }
        let LeisureJob { tenant, id, system } = job;
        let pin = Pin { text: Arc::clone(&text), system, pinned };
        if !self.pins.add((tenant.clone(), id.clone()), pin) {
            info!(id, "a registered document is not pinned, because its tenant has pinned as much as it may");
            return Ok(());
        }
        debug!(id, "pinned a registered document");
        self.unpin_in_time(tenant, id);
        Ok(())
    }

    /// Unpins a document once it has expired, or now if it has been removed or replaced since it was computed.
    fn unpin_in_time(self: &Arc<Self>, tenant: Option<Arc<str>>, id: String) {
        let Some(left) = self.time_left(tenant.as_ref(), &id) else {
            return self.pins.remove(tenant.as_ref(), &id);
        };
        if left == Duration::MAX {
            return;
        }
        let service = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(left + Duration::from_millis(1)).await;
            if let Some(service) = service.upgrade() {
                // It may have been registered for longer in the meantime.
                service.unpin_in_time(tenant, id);
            }
        });
    }

    /// Returns the time until a pinned document expires, which is the longest one for a document that never does. Returns
    /// `None` if it is no longer registered with the text that is pinned.
    fn time_left(&self, tenant: Option<&Arc<str>>, id: &str) -> Option<Duration> {
        let (library, now) = (self.libraries.of(tenant), self.libraries.now());
        let mut library = library.lock();
        let document = library.get(id)?;
        let pins = self.pins.all.lock();
        let pin = pins.get(&(tenant.cloned(), id.to_owned()))?;
        (pin.text == document.text).then(|| {
            document.expires.map_or(Duration::MAX, |at| Duration::from_millis(at.saturating_sub(now)))
        })
    }

    /// Lets all documents be evicted while `work` runs on the engine's thread. Afterwards they are computed again at
    /// leisure, if they have left, and pinned.
    pub(crate) async fn unpinned<R: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut kvengine::Engine) -> R + Send + 'static,
        falls_asleep: impl FnOnce(&R) -> bool,
    ) -> Result<R, Refusal> {
        let jobs = self.pins.take();
        let done = self.engine.call(work).await;
        if done.as_ref().is_ok_and(falls_asleep) {
            self.pins.asleep.lock().extend(jobs);
        } else {
            self.pin_at_leisure(jobs);
        }
        done
    }

    /// Pins what was pinned when the caches fell asleep.
    pub(crate) fn pin_what_slept(self: &Arc<Self>) {
        let jobs = std::mem::take(&mut *self.pins.asleep.lock());
        self.pin_at_leisure(jobs);
    }
}
