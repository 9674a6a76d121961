//! The last requests, as the page draws them.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;

use crate::report::{KvReport, Segment};
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
    pub(crate) fn new(
        report: &KvReport,
        segments: Vec<Segment>,
        total: Duration,
        tenant: Option<&str>,
    ) -> Self {
        Self {
            at: unix_time_ms(),
            tenant: tenant.map(str::to_owned),
            prompt_tokens: report.prompt_tokens,
            reused: report.reused,
            recomputed: report.recomputed,
            ttft_ms: report.ttft_ms,
            queue_ms: report.queue_ms,
            total_ms: 1e3 * total.as_secs_f64(),
            segments,
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
