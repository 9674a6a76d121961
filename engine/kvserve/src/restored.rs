//! Documents that were registered before the server started.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kvengine::{DocumentCosts, DocumentLibrary, NewDocument};
use tracing::{debug, info, warn};

use crate::error::Result;
use crate::journal::{Journal, Registration};
use crate::leisure::LeisureJob;
use crate::library::Libraries;
use crate::service::Service;
use crate::tenants::ApiKeys;
use crate::text_work;

/// The time between two looks at whether another document may wait to be computed.
const LOOK: Duration = Duration::from_millis(100);

/// A document of the journal that is registered again.
#[derive(Debug)]
pub(crate) struct Restored {
    tenant: Option<Arc<str>>,
    id: String,
    text: Arc<str>,
    /// The system prompt behind which it is computed.
    system: Option<Arc<str>>,
}

/// Registers the documents of a journal again, for the time that they have left at `now`, in milliseconds since 1970.
/// Documents of tenants without a key, and documents past the limits, stay in the file alone. The newest ones are within the
/// limits, because these may have been lowered after the others were registered.
///
/// # Errors
/// Returns [`Error::Documents`](crate::Error::Documents) if the file cannot be read.
pub(crate) fn restore(
    journal: &mut Journal,
    libraries: &Libraries,
    keys: Option<&ApiKeys>,
    now: u64,
) -> Result<Vec<Restored>> {
    let mut restoring = Restoring {
        libraries,
        keys,
        now,
        restored: Vec::new(),
        systems: HashSet::new(),
        unknown: 0,
        refused: 0,
    };
    journal.for_each(false, |document| restoring.register(document))?;
    if restoring.refused > 0 {
        restoring.forget();
        journal.for_each(true, |document| restoring.register(document))?;
    }
    let Restoring { restored, unknown, refused, .. } = restoring;
    if unknown > 0 {
        warn!(
            documents = unknown,
            "registered documents belong to tenants that the file of keys does not name; they stay in their file, and are \
             loaded when it names the tenants again"
        );
    }
    if refused > 0 {
        warn!(
            documents = refused,
            "registered documents are more than the limits allow, and stay in their file; raise --max-documents or \
             --max-document-bytes to load them"
        );
    }
    info!(documents = restored.len(), "loaded the registered documents");
    Ok(restored)
}

/// The documents that have been registered so far.
struct Restoring<'a> {
    libraries: &'a Libraries,
    keys: Option<&'a ApiKeys>,
    now: u64,
    restored: Vec<Restored>,
    /// The system prompts. Most documents of a tenant have the same one.
    systems: HashSet<Arc<str>>,
    /// The number of documents of tenants without a key.
    unknown: usize,
    /// The number of documents past the limits.
    refused: usize,
}

impl Restoring<'_> {
    /// Registers a document of the journal.
    fn register(&mut self, document: Registration<'static>) {
        let Registration { tenant, id, title, text, system, expires, ttl } = document;
        let left = expires.map(|at| at.saturating_sub(self.now).min(ttl.unwrap_or(u64::MAX)));
        if left == Some(0) {
            return;
        }
        let is_known = match (&tenant, self.keys) {
            (None, None) => true,
            (Some(tenant), Some(keys)) => keys.has(tenant),
            _ => false,
        };
        if !is_known {
            self.unknown += 1;
            return;
        }
        let tenant = tenant.as_deref().map(Arc::from);
        let library = self.libraries.of(tenant.as_ref());
        let mut library = library.lock();
        let id = id.into_owned();
        let title = title.map(std::borrow::Cow::into_owned);
        let new = NewDocument {
            id: id.clone(),
            title,
            text: text.into_owned(),
            ttl: left.map(Duration::from_millis),
        };
        if let Err(error) = library.register(new) {
            debug!(id, %error, "a registered document is not loaded");
            self.refused += 1;
            return;
        }
        let Some(text) = library.get(&id).map(|document| Arc::clone(&document.text)) else { return };
        let system = system.map(|system| {
            let shared = self.systems.get(&*system).cloned();
            shared.unwrap_or_else(|| {
                let new: Arc<str> = system.into();
                self.systems.insert(Arc::clone(&new));
                new
            })
        });
        self.restored.push(Restored { tenant, id, text, system });
    }

    /// Removes all documents again.
    fn forget(&mut self) {
        for Restored { tenant, id, .. } in self.restored.drain(..) {
            self.libraries.of(tenant.as_ref()).lock().remove(&id);
        }
        (self.unknown, self.refused) = (0, 0);
    }
}

impl Service {
    /// Counts the tokens of restored documents, and then lets those with a system prompt be computed at leisure. Leaves
    /// half of the room for jobs to documents that are registered in the meantime.
    pub(crate) async fn resume(self: Arc<Self>, restored: Vec<Restored>) {
        let mut counted = Vec::with_capacity(restored.len());
        for one in restored {
            let (codec, text) = (self.codec.clone(), Arc::clone(&one.text));
            let tokens = text_work::run((), move || Ok(codec.encode(&text, false)?.len())).await;
            let tokens = match tokens {
                Ok((tokens, ())) => tokens,
                Err(refusal) => {
                    info!(
                        id = one.id,
                        reason = refusal.message,
                        "the tokens of a registered document are not counted"
                    );
                    continue;
                }
            };
            let costs =
                DocumentCosts { tokens, kv_bytes: self.kv_bytes(tokens), computed_in: Duration::ZERO };
            self.if_kept(&one, |library| library.set_costs(&one.id, costs));
            counted.push(one);
        }
        // Nothing would be found at another position without reuse.
        for one in counted.into_iter().filter(|_| self.reuse.is_some()) {
            let Some(system) = &one.system else { continue };
            while !self.leisure.has_half(system) {
                tokio::time::sleep(LOOK).await;
            }
            self.if_kept(&one, |_| {
                let (tenant, id) = (one.tenant.clone(), one.id.clone());
                let (system, text) = (system.as_ref().to_owned(), Arc::clone(&one.text));
                self.pin_at_leisure([LeisureJob { tenant, id, system, text }]);
            });
        }
    }

    /// Calls a function, unless a client has registered the document again or removed it.
    fn if_kept<R>(&self, one: &Restored, call: impl FnOnce(&mut DocumentLibrary) -> R) {
        let library = self.libraries.of(one.tenant.as_ref());
        let mut library = library.lock();
        if library.get(&one.id).is_some_and(|document| Arc::ptr_eq(&document.text, &one.text)) {
            call(&mut library);
        }
    }
}
