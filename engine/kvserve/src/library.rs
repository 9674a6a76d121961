//! The registered documents of each tenant, which are found verbatim in prompts.

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::SystemClock;
use kvengine::{DocumentLibrary, LibraryLimits};
use parking_lot::Mutex;

/// The library of a tenant. A search takes less than a millisecond for a prompt of 32 KiB, and longer for longer ones, so it
/// is not done on threads that serve connections.
pub(crate) type SharedLibrary = Arc<Mutex<DocumentLibrary>>;

/// The libraries of all tenants.
#[derive(Debug)]
pub(crate) struct Libraries {
    limits: LibraryLimits,
    clock: Arc<SystemClock>,
    /// By the tag of the tenant; `None` for the default tenant.
    all: Mutex<HashMap<Option<Arc<str>>, SharedLibrary>>,
}

impl Libraries {
    /// Creates empty libraries. Each tenant may have documents up to `limits`.
    pub(crate) fn new(limits: LibraryLimits) -> Self {
        Self { limits, clock: Arc::default(), all: Mutex::default() }
    }

    /// Returns the library of a tenant.
    pub(crate) fn of(&self, tenant: Option<&Arc<str>>) -> SharedLibrary {
        let create = || {
            let clock: Arc<dyn kvcore::Clock> = Arc::<SystemClock>::clone(&self.clock);
            Arc::new(Mutex::new(DocumentLibrary::new(self.limits, clock)))
        };
        Arc::clone(self.all.lock().entry(tenant.cloned()).or_insert_with(create))
    }

    /// Returns the time of the libraries' clock in milliseconds.
    pub(crate) fn now(&self) -> u64 {
        kvcore::Clock::millis(&*self.clock)
    }

    /// Returns the libraries of all tenants, sorted by the tags of the tenants.
    pub(crate) fn all(&self) -> Vec<(Option<Arc<str>>, SharedLibrary)> {
        let one =
            |(tenant, library): (&Option<Arc<str>>, &SharedLibrary)| (tenant.clone(), Arc::clone(library));
        let mut all: Vec<_> = self.all.lock().iter().map(one).collect();
        all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        all
    }
}
