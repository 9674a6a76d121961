//! The registered documents that the page lists.

use serde::Serialize;

use crate::service::Service;

/// The number of documents that are listed.
const LISTED: usize = 20;

/// The registered documents of all tenants.
#[derive(Debug, Serialize)]
pub(super) struct Registered {
    /// The number of documents, and of bytes of their texts.
    count: usize,
    bytes: usize,
    /// The first ones, by tenant and ID.
    listed: Vec<Listed>,
}

/// A registered document.
#[derive(Debug, Serialize)]
struct Listed {
    tenant: Option<String>,
    id: String,
    title: Option<String>,
    /// The number of tokens, and of bytes of their keys and values. After a restart, tokens are not counted at once.
    tokens: Option<usize>,
    kv_bytes: Option<u64>,
    pinned: bool,
    /// `None` if the document is kept until it is removed.
    expires_in_seconds: Option<f64>,
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
                all.listed.push(Listed {
                    tenant: tenant.as_deref().map(str::to_owned),
                    id: document.id.to_string(),
                    title: document.title.clone(),
                    tokens: document.costs.map(|costs| costs.tokens),
                    kv_bytes: document.costs.map(|costs| costs.kv_bytes),
                    pinned: service.pins.contains(tenant.as_ref(), &document.id),
                    expires_in_seconds: document.expires.map(|at| at.saturating_sub(now) as f64 / 1e3),
                });
            }
        }
        all
    }
}
