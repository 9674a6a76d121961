//! Chunks and prefixes that outlive the process: a tier on a disk below the caches.
//!
//! ```text
//!   computed ──► save: copied ─► queue of the slab                         the request does not wait
//!   before a lookup ──► fetch: what is missing here and on the disk        the step does not wait
//!        ├─ a few have arrived ──► written to blocks while the disk works
//!        └─ over, or slower than computing ──► lookup: the rest is written ──► Hit      what is missing: Compute
//! ```
//!
//! The bytes of a chunk or a block follow from its key, so what is loaded equals what would be computed. A piece
//! whose hash is not collision-resistant, or that slept quantised, is not saved.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvtier::{Slab, SlabStep};

use crate::metrics::LatencyHistogram;
use crate::replica::ReplicaDevice;

mod accounts;
mod early;
mod fetch;
mod lookup;
mod metrics;
mod missed;
mod patience;
mod portable;
mod prefill;
mod prefix;
mod save;
mod staging;

use accounts::TierAccounts;
pub use fetch::{BeganFetch, TierFetch};
pub(crate) use lookup::TierLookup;
pub use metrics::TierMetrics;
pub use missed::MissReason;
pub use portable::{Adopted, Adoption};
pub use prefill::PrefillRate;
pub(crate) use save::TierSaving;
use staging::Staging;

/// The largest number of bytes that all requests together may have loaded and not yet used.
const STAGED_BYTES: usize = 1 << 30;

/// The longest time that a request waits for records whose computation was not measured.
const PATIENCE: Duration = Duration::from_secs(2);

/// The link between an engine's caches and a slab on a disk.
#[derive(Debug, Clone)]
pub struct TierLink {
    /// The memory that holds the caches' blocks.
    pub device: ReplicaDevice,
    /// The records on the disk.
    pub slab: Arc<Slab>,
    /// When records are loaded instead of computed.
    pub rule: LoadRule,
    /// The time that computing takes, to compare loads with.
    pub prefill: Arc<PrefillRate>,
    staging: Arc<Staging>,
    /// The number of prompts whose loads were expected to be slower than computing, from 1.
    skips: Arc<AtomicU64>,
    /// The number of saves that the backend refused.
    save_errors: Arc<AtomicU64>,
    accounts: Arc<TierAccounts>,
    waits: Arc<LatencyHistogram>,
    times: Arc<TierTimes>,
}

/// The times that the disk takes.
#[derive(Debug, Default)]
struct TierTimes {
    loads: LatencyHistogram,
    writes: LatencyHistogram,
}

/// The rule for loading records instead of computing their contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadRule {
    /// A request loads what is expected to be loaded before it would be computed, and stops waiting as soon as
    /// waiting costs it more than a twentieth of the time to compute everything.
    #[default]
    IfFaster,
    /// A request loads everything, and waits at most this long.
    Always(Duration),
}

impl TierLink {
    /// Creates a link that loads what is [faster](LoadRule::IfFaster) to load.
    pub fn new(device: ReplicaDevice, slab: Arc<Slab>) -> Self {
        let (staging, skips) = (Staging::new(STAGED_BYTES), Arc::new(AtomicU64::new(1)));
        let times = Arc::<TierTimes>::default();
        let observer = Arc::clone(&times);
        slab.observe(Arc::new(move |step, time| match step {
            SlabStep::Load => observer.loads.record(time),
            SlabStep::Write => observer.writes.record(time),
        }));
        Self {
            device,
            slab,
            rule: LoadRule::default(),
            prefill: Arc::default(),
            staging,
            skips,
            save_errors: Arc::default(),
            accounts: Arc::default(),
            waits: Arc::default(),
            times,
        }
    }

    /// Returns what the disk contains, what it has done, how long prompts have waited for it, how many saves the backend
    /// has refused, and what each tenant has on the disk.
    pub fn metrics(&self) -> TierMetrics {
        let save_errors = self.save_errors.load(Ordering::Relaxed);
        TierMetrics {
            usage: self.slab.usage(),
            save_errors,
            tenants: self.tenants(),
            waits: self.waits.snapshot(),
            loads: self.times.loads.snapshot(),
            writes: self.times.writes.snapshot(),
        }
    }
}
