//! The last requests, as the page draws them.

use std::collections::VecDeque;

use kvengine::Generation;
use parking_lot::Mutex;
use serde::Serialize;

use crate::report::{Described, Segment};
use crate::service::unix_time_ms;

/// The number of requests that are remembered.
const MOST: usize = 40;

/// A request whose first sample has ended.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RecentRequest {
    /// The time of its end, in milliseconds since 1970.
    at: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    prompt_tokens: usize,
    /// The number of prompt tokens that were found.
    reused: usize,
    /// The number of document tokens that were computed a second time.
    recomputed: usize,
    pub(super) ttft_ms: f64,
    queue_ms: f64,
    total_ms: f64,
    segments: Vec<Segment>,
}

impl RecentRequest {
    pub(crate) fn new(described: &Described, generation: &Generation, tenant: Option<&str>) -> Self {
        let ms = |time: std::time::Duration| 1e3 * time.as_secs_f64();
        Self {
            at: unix_time_ms(),
            tenant: tenant.map(str::to_owned),
            prompt_tokens: generation.prompt_tokens,
            reused: generation.cached_tokens,
            recomputed: generation.recomputed_tokens,
            ttft_ms: ms(generation.ttft),
            queue_ms: ms(generation.queued),
            total_ms: ms(generation.total),
            segments: described.segments(generation),
        }
    }
}

/// The last requests of all tenants.
#[derive(Debug, Default)]
pub(crate) struct RecentRequests(Mutex<VecDeque<RecentRequest>>);

impl RecentRequests {
    pub(crate) fn add(&self, request: RecentRequest) {
        let mut all = self.0.lock();
        all.truncate(MOST - 1);
        all.push_front(request);
    }

    /// Returns the requests, the last one first.
    pub(super) fn all(&self) -> Vec<RecentRequest> {
        self.0.lock().iter().cloned().collect()
    }
}
