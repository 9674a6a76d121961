//! The data that the page shows.

use kvcore::PoolCounts;
use kvengine::Engine;
use serde::Serialize;

use super::recent::RecentRequest;
use super::registered::Registered;
use crate::metrics::Totals;
use crate::service::{Service, unix_time};

/// The data of the page.
#[derive(Debug, Serialize)]
pub(super) struct Overview {
    model: String,
    version: &'static str,
    /// A few words about the reuse of documents.
    way: String,
    /// The start of the server and the present, in seconds since 1970.
    started: u64,
    now: u64,
    running: usize,
    waiting: usize,
    totals: Totals,
    registered: Registered,
    /// The median over the last requests, if there are some.
    first_token_ms: Option<f64>,
    #[serde(flatten)]
    caches: Caches,
    /// The last requests, the last one first.
    recent: Vec<RecentRequest>,
}

/// The state of the engine's caches.
#[derive(Debug, Default, Serialize)]
pub(super) struct Caches {
    pools: Vec<Pool>,
    documents: Lookups,
    tiers: Vec<Tier>,
}

/// A pool of blocks on the device.
#[derive(Debug, Serialize)]
struct Pool {
    name: &'static str,
    bytes: usize,
    #[serde(flatten)]
    counts: PoolCounts,
}

/// The lookups of pieces of documents.
#[derive(Debug, Default, Serialize)]
struct Lookups {
    lookups: u64,
    hits: u64,
}

/// A tier below the device.
#[derive(Debug, Serialize)]
struct Tier {
    name: &'static str,
    records: usize,
    bytes: u64,
    limit_bytes: Option<u64>,
    hits: u64,
    misses: u64,
    evicted: u64,
}

impl Overview {
    /// Puts the data together.
    pub(super) fn new(service: &Service, caches: Caches, registered: Registered) -> Self {
        let (step, recent) = (service.engine.last_step(), service.recent.all());
        let mut first: Vec<f64> = recent.iter().map(|request| request.ttft_ms).collect();
        first.sort_unstable_by(f64::total_cmp);
        Self {
            model: service.names.first().cloned().unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION"),
            way: service.way(),
            started: service.started,
            now: unix_time(),
            running: step.running,
            waiting: step.waiting,
            totals: service.metrics.totals(),
            registered,
            first_token_ms: first.get(first.len() / 2).copied(),
            caches,
            recent,
        }
    }
}

impl Caches {
    /// Reads the caches of an engine.
    pub(super) fn of(engine: &Engine) -> Self {
        let report = engine.report();
        let mut caches = Self::default();
        let pools = [("sequences", report.main), ("documents", report.chunks)];
        let blocks: usize = pools.iter().filter_map(|(_, counts)| counts.map(|counts| counts.total)).sum();
        for (name, counts) in pools {
            let Some(counts) = counts else { continue };
            let bytes = report.kv_bytes / blocks.max(1) * counts.total;
            caches.pools.push(Pool { name, bytes, counts });
        }
        if let Some(chunks) = &report.chunk_cache {
            caches.documents = Lookups { lookups: chunks.lookup_count, hits: chunks.hit_count };
            if let Some(asleep) = report.chunk_sleep.filter(|asleep| asleep.limit_bytes > 0) {
                caches.tiers.push(Tier {
                    name: "host memory",
                    records: asleep.pieces,
                    bytes: asleep.host_bytes as u64,
                    limit_bytes: Some(asleep.limit_bytes as u64),
                    hits: chunks.woken,
                    misses: 0,
                    evicted: chunks.lost,
                });
            }
        }
        if let Some(disk) = engine.disk() {
            let usage = disk.usage();
            caches.tiers.push(Tier {
                name: "disk",
                records: usage.records,
                bytes: usage.bytes,
                limit_bytes: Some(usage.limit_bytes),
                hits: usage.hits,
                misses: usage.misses,
                evicted: usage.evicted,
            });
        }
        caches
    }
}
