//! The keys of clients, and the tenants that they belong to.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use kvchunk::Tenant;
use kvengine::Engine;

use crate::error::{Error, Result};
use crate::refusal::{Kind, Refusal};

/// The keys of clients, each with its tenant.
///
/// The tenant of a request follows from its key alone, so a client cannot find what another tenant has by what it writes into
/// a request. Tenants share the memory of the caches: what one of them computes may push out what another has not used for
/// longer.
#[derive(Debug, Clone, Default)]
pub struct ApiKeys {
    /// The tenants by the hashes of their keys. A lookup takes the same time for every wrong key.
    tenants: HashMap<[u8; 32], Arc<str>>,
}

impl ApiKeys {
    /// Reads a file with a key and the name of its tenant in each line, separated by white space. Several keys may have
    /// the same tenant. Empty lines and lines that start with `#` are ignored.
    ///
    /// # Errors
    /// Returns [`Error::Keys`] if the file cannot be read, and [`Error::KeyLine`] for a malformed line or a key that
    /// occurs twice. Errors do not contain keys.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = kvmodel::read_small_file(path);
        let bytes = bytes.map_err(|source| Error::Keys { path: path.to_owned(), source })?;
        let wrong =
            |line, reason: &str| Error::KeyLine { path: path.to_owned(), line, reason: reason.to_owned() };
        let Ok(text) = std::str::from_utf8(&bytes) else { return Err(wrong(1, "it is not UTF-8")) };
        let mut keys = Self::default();
        for (line, text) in (1..).zip(text.lines()) {
            let text = text.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let mut words = text.split_whitespace();
            let (Some(key), Some(tenant), None) = (words.next(), words.next(), words.next()) else {
                return Err(wrong(line, "it does not have two words"));
            };
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(wrong(line, "the key has characters that no HTTP header may have"));
            }
            if tenant == Tenant::DEFAULT_TAG {
                return Err(wrong(line, "this name belongs to the default tenant, who has no key"));
            }
            if !keys.add(key, tenant) {
                return Err(wrong(line, "this key occurs twice"));
            }
        }
        if keys.tenants.is_empty() {
            return Err(wrong(1, "the file has no keys, so nobody could use the server"));
        }
        Ok(keys)
    }

    /// Adds a key. Returns false if the key is known already, in which case its tenant stays.
    pub fn add(&mut self, key: &str, tenant: &str) -> bool {
        let known = self.tenants.values().find(|known| &***known == tenant).cloned();
        let slot = self.tenants.entry(hashed(key));
        let new = matches!(slot, std::collections::hash_map::Entry::Vacant(_));
        slot.or_insert_with(|| known.unwrap_or_else(|| tenant.into()));
        new
    }

    /// Returns the number of tenants.
    pub(crate) fn tenants(&self) -> usize {
        self.tenants.values().collect::<BTreeSet<_>>().len()
    }

    /// Returns true if a key has this tenant.
    pub(crate) fn has(&self, tenant: &str) -> bool {
        self.tenants.values().any(|known| &**known == tenant)
    }

    /// Adds the tenants to the chunk cache.
    pub(crate) fn register(&self, engine: &Engine) -> Result<()> {
        let Some(chunks) = engine.chunks() else {
            let error = kvengine::Error::NoChunks("use a paged cache to keep tenants apart");
            return Err(error.into());
        };
        let tags: BTreeSet<&Arc<str>> = self.tenants.values().collect();
        for tag in tags {
            match chunks.add_tenant(Tenant::new(tag)) {
                Ok(_) | Err(kvchunk::Error::TenantExists(_)) => {}
                Err(error) => return Err(kvengine::Error::from(error).into()),
            }
        }
        Ok(())
    }
}

/// Returns the tenant of a request: that of the key in `Authorization: Bearer KEY` or `x-api-key: KEY`, or `None` without
/// a file of keys.
///
/// # Errors
/// Refuses a missing or unknown key.
pub(crate) fn tenant(keys: Option<&ApiKeys>, headers: &HeaderMap) -> Result<Option<Arc<str>>, Refusal> {
    let Some(keys) = keys else { return Ok(None) };
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let own = headers.get("x-api-key").and_then(|value| value.to_str().ok()).map(str::trim);
    let unauthorized =
        |code, message: &str| Refusal { code: Some(code), ..Refusal::new(Kind::Unauthorized, message) };
    let Some(key) = bearer.or(own) else {
        let message = "this server needs a key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(unauthorized("missing_api_key", message));
    };
    let tenant = keys.tenants.get(&hashed(key)).cloned();
    tenant
        .map(Some)
        .ok_or_else(|| unauthorized("invalid_api_key", "this server does not know the key; ask its operator"))
}

fn hashed(key: &str) -> [u8; 32] {
    *blake3::hash(key.as_bytes()).as_bytes()
}

/// The tenant whose keys may read metrics and control the server, if there are keys.
pub(crate) const OPERATOR: &str = "operator";
