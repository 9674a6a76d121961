//! The registered documents that the page lists.

use serde::Serialize;
use serde_json::{Value, json};

use crate::dialect::registered::shown;
use crate::service::Service;

/// The number of documents that are listed.
const LISTED: usize = 20;

/// The registered documents of all tenants.
#[derive(Debug, Serialize)]
pub(super) struct Registered {
    /// The number of documents, and of bytes of their texts.
    count: usize,
    bytes: usize,
    /// The first ones, by tenant and ID: as clients see them, with their tenants.
    listed: Vec<Value>,
}

impl Registered {
    /// Counts the documents, and lists the first ones. Waits for searches in long prompts.
    pub(super) fn of(service: &Service) -> Self {
        let now = service.libraries.now();
        let mut all = Self { count: 0, bytes: 0, listed: Vec::new() };
        for (tenant, library) in service.libraries.all() {
            let mut library = library.lock();
            all.bytes += library.bytes();
            for document in library.documents() {
                all.count += 1;
                if all.listed.len() == LISTED {
                    continue;
                }
                let is_pinned = service.pins.contains(tenant.as_ref(), &document.id);
                let mut listed = shown(document, now, is_pinned);
                listed["tenant"] = json!(tenant.as_deref());
                all.listed.push(listed);
            }
        }
        all
    }
}
