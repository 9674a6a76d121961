//! What a disk contains, what it has done, and how long requests have waited for it.

use std::collections::BTreeMap;

use kvtier::{AccountUsage, SlabUsage};
use serde::Serialize;

use crate::metrics::{Exposition, Latencies, LatencyColumn, MetricKind, NumberColumn};

/// The metrics of a disk below the caches.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TierMetrics {
    /// What the disk contains, and what it has done.
    #[serde(flatten)]
    pub usage: SlabUsage,
    /// Saves of a chunk, or of the blocks of a prefix, that the backend refused, so that nothing was queued.
    pub save_errors: u64,
    /// The use of the disk by each tenant that has used it in this process, by the tag of the tenant.
    pub tenants: BTreeMap<String, AccountUsage>,
    /// The times from the start of a prompt's loads until the prompt was looked up.
    pub waits: Latencies,
    /// The times from the start of a record's load until it was read and checked, or could not be read.
    pub loads: Latencies,
    /// The times from the first write of a batch of records until the disk has synced it or failed.
    pub writes: Latencies,
}

impl TierMetrics {
    /// Formats the metrics of several disks for Prometheus. Each name becomes the value of the label `tier`. A tenant's
    /// tag becomes the value of the label `tenant`.
    ///
    /// ```
    /// use kvchunk::TierMetrics;
    /// let mut metrics = TierMetrics::default();
    /// metrics.usage.hits = 3;
    /// let text = TierMetrics::prometheus(&[("nvme", &metrics)]);
    /// assert!(text.contains("kv_tier_hits_total{tier=\"nvme\"} 3.0\n"));
    /// assert!(text.contains("kv_tier_limit_bytes{tier=\"nvme\"} 0.0\n"));
    /// metrics.tenants.entry("alice".to_owned()).or_default().records = 2;
    /// let text = TierMetrics::prometheus(&[("nvme", &metrics)]);
    /// assert!(text.contains("kv_tier_tenant_records{tier=\"nvme\",tenant=\"alice\"} 2.0\n"));
    /// ```
    pub fn prometheus(tiers: &[(&str, &Self)]) -> String {
        let mut text = Exposition::default();
        text.numbers(&NUMBERS, "tier", tiers);
        for (name, kind, help, value) in TENANT_NUMBERS {
            let tenants = tiers.iter().flat_map(|(tier, m)| m.tenants.iter().map(move |of| (tier, of)));
            let samples = tenants.filter_map(|(tier, (tag, usage))| Some((tier, tag, value(usage)?)));
            let samples: Vec<_> = samples.collect();
            if samples.is_empty() {
                continue;
            }
            let family = text.family(name, kind, help);
            for (tier, tag, value) in samples {
                family.sample(&[("tier", tier), ("tenant", tag)], value);
            }
        }
        text.latencies(&TIMES, "tier", tiers);
        text.to_string()
    }
}

const TIMES: [LatencyColumn<TierMetrics>; 3] = [
    ("kv_tier_wait_seconds", "Time from the start of the loads of a prompt until it was looked up", |m| {
        &m.waits
    }),
    ("kv_tier_load_seconds", "Time to load a record", |m| &m.loads),
    ("kv_tier_write_seconds", "Time to write and sync a batch of records", |m| &m.writes),
];

const NUMBERS: [NumberColumn<TierMetrics>; 18] = [
    ("kv_tier_bytes", MetricKind::Gauge, "Bytes that contain records or are set aside", |m| {
        m.usage.bytes as f64
    }),
    ("kv_tier_limit_bytes", MetricKind::Gauge, "Size of the file, which is its limit", |m| {
        m.usage.limit_bytes as f64
    }),
    ("kv_tier_records", MetricKind::Gauge, "Records", |m| m.usage.records as f64),
    ("kv_tier_memory_bytes", MetricKind::Gauge, "Bytes of records in host memory above the disk", |m| {
        m.usage.memory_bytes as f64
    }),
    ("kv_tier_memory_limit_bytes", MetricKind::Gauge, "Largest number of bytes in host memory", |m| {
        m.usage.memory_limit_bytes as f64
    }),
    ("kv_tier_memory_hits", MetricKind::Counter, "Records found in host memory", |m| {
        m.usage.memory_hits as f64
    }),
    ("kv_tier_hits", MetricKind::Counter, "Records loaded", |m| m.usage.hits as f64),
    ("kv_tier_misses", MetricKind::Counter, "Records asked for and not loaded", |m| m.usage.misses as f64),
    ("kv_tier_differs", MetricKind::Counter, "Records with other tokens or another layout", |m| {
        m.usage.differs as f64
    }),
    ("kv_tier_loads_skipped_slower", MetricKind::Counter, "Loads skipped because computing is faster", |m| {
        m.usage.loads_skipped_slower as f64
    }),
    ("kv_tier_damaged", MetricKind::Counter, "Records whose bytes had changed", |m| m.usage.damaged as f64),
    ("kv_tier_deadline_exceeded", MetricKind::Counter, "Loads that were given up", |m| {
        m.usage.deadline_exceeded as f64
    }),
    ("kv_tier_read_errors", MetricKind::Counter, "Loads that the disk refused", |m| {
        m.usage.read_errors as f64
    }),
    ("kv_tier_write_errors", MetricKind::Counter, "Batches that the disk refused", |m| {
        m.usage.write_errors as f64
    }),
    (
        "kv_tier_write_deadline_exceeded",
        MetricKind::Counter,
        "Batches given up at the deadline of a write",
        |m| m.usage.write_deadline_exceeded as f64,
    ),
    ("kv_tier_save_errors", MetricKind::Counter, "Saves that the backend refused", |m| m.save_errors as f64),
    ("kv_tier_stores_dropped", MetricKind::Counter, "Records not stored", |m| m.usage.stores_dropped as f64),
    ("kv_tier_evicted", MetricKind::Counter, "Records evicted", |m| m.usage.evicted as f64),
];

/// A number of a tenant: its name, kind, help text, and value if the tenant has one.
type TenantColumn = (&'static str, MetricKind, &'static str, fn(&AccountUsage) -> Option<f64>);

const TENANT_NUMBERS: [TenantColumn; 4] = [
    ("kv_tier_tenant_bytes", MetricKind::Gauge, "Bytes of a tenant's records", |m| Some(m.bytes as f64)),
    ("kv_tier_tenant_records", MetricKind::Gauge, "Records of a tenant", |m| Some(m.records as f64)),
    ("kv_tier_tenant_limit_bytes", MetricKind::Gauge, "Limit of a tenant that has one", |m| {
        m.limit_bytes.map(|limit| limit as f64)
    }),
    ("kv_tier_tenant_evicted", MetricKind::Counter, "Records of a tenant that were evicted", |m| {
        Some(m.evicted as f64)
    }),
];
