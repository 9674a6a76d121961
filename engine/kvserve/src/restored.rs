//! Documents that were registered before the server started.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kvengine::{DocumentCosts, NewDocument};
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
/// Documents of tenants without a key, and documents past the limits, stay in the file alone.
///
/// # Errors
/// Returns [`Error::Documents`](crate::Error::Documents) if the file cannot be read.
pub(crate) fn restore(
    journal: &mut Journal,
    libraries: &Libraries,
    keys: Option<&ApiKeys>,
    now: u64,
) -> Result<Vec<Restored>> {
    let (mut restored, mut systems, mut unknown, mut refused) = (Vec::new(), HashSet::new(), 0, 0);
    journal.for_each(|document| {
        let Registration { tenant, id, title, text, system, expires } = document;
        let is_known = match (&tenant, keys) {
            (None, None) => true,
            (Some(tenant), Some(keys)) => keys.has(tenant),
            _ => false,
        };
        if !is_known {
            unknown += 1;
            return;
        }
        let tenant = tenant.as_deref().map(Arc::from);
        let library = libraries.of(tenant.as_ref());
        let mut library = library.lock();
        let ttl = expires.map(|at| Duration::from_millis(at.saturating_sub(now)));
        let id = id.into_owned();
        let title = title.map(std::borrow::Cow::into_owned);
        if let Err(error) =
            library.register(NewDocument { id: id.clone(), title, text: text.into_owned(), ttl })
        {
            debug!(id, %error, "a registered document is not loaded");
            refused += 1;
            return;
        }
        let Some(text) = library.get(&id).map(|document| Arc::clone(&document.text)) else { return };
        // Most documents of a tenant have the same system prompt.
        let system = system.map(|system| {
            let shared = systems.get(&*system).cloned();
            shared.unwrap_or_else(|| {
                let new: Arc<str> = system.into();
                systems.insert(Arc::clone(&new));
                new
            })
        });
        restored.push(Restored { tenant, id, text, system });
    })?;
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

impl Service {
    /// Counts the tokens of restored documents, and lets those with a system prompt be computed at leisure.
    pub(crate) async fn resume(self: Arc<Self>, restored: Vec<Restored>) {
        for Restored { tenant, id, text, system } in restored {
            let (codec, counted) = (self.codec.clone(), Arc::clone(&text));
            let tokens = text_work::run((), move || Ok(codec.encode(&counted, false)?.len())).await;
            let tokens = match tokens {
                Ok((tokens, ())) => tokens,
                Err(refusal) => {
                    info!(
                        id,
                        reason = refusal.message,
                        "the tokens of a registered document are not counted"
                    );
                    continue;
                }
            };
            // Nothing would be found at another position without reuse.
            let system = system.filter(|_| self.reuse.is_some());
            while system.as_ref().is_some_and(|system| self.leisure.check(system).is_err()) {
                tokio::time::sleep(LOOK).await;
            }
            let library = self.libraries.of(tenant.as_ref());
            let mut library = library.lock();
            // A client may have registered it again in the meantime.
            if library.get(&id).is_none_or(|document| !Arc::ptr_eq(&document.text, &text)) {
                continue;
            }
            let costs =
                DocumentCosts { tokens, kv_bytes: self.kv_bytes(tokens), computed_in: Duration::ZERO };
            library.set_costs(&id, costs);
            if let Some(system) = system {
                self.pin_at_leisure([LeisureJob { tenant, id, system: system.as_ref().to_owned() }]);
            }
        }
    }
}
