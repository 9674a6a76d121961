//! The dialects: each module translates requests of one kind of client to [`Ask`](crate::ask::Ask), and replies back.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) mod anthropic;
pub(crate) mod cohere;
pub(crate) mod control;
pub(crate) mod documents;
pub(crate) mod openai;
pub(crate) mod registered;
pub(crate) mod responses;
pub(crate) mod shape;
pub(crate) mod stream;
pub(crate) mod tokens;

/// Returns a number that no other call returns and no client can guess.
pub(crate) fn random() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    // Each state has random keys from the system.
    RandomState::new().hash_one(CALLS.fetch_add(1, Ordering::Relaxed))
}

/// Returns a new ID with the prefix of a dialect.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random(), random())
}
