//! Registered documents that wait to be computed, one after another, while nobody else wants the engine.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;

use crate::refusal::{Kind, Refusal};
use crate::service::Service;

/// The maximum number of bytes of all system prompts that wait.
const MOST: usize = 64 << 20;

/// The longest time that a document waits for a moment without requests. A server that is never idle computes it then.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time between two looks at whether the server is idle.
const LOOK: Duration = Duration::from_millis(10);

/// A document to compute behind a system prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeisureJob {
    /// The tag of the tenant; `None` for the default tenant.
    pub(crate) tenant: Option<Arc<str>>,
    pub(crate) id: String,
    pub(crate) system: String,
}

/// The documents that wait, in the order of their registration.
#[derive(Debug, Default)]
pub(crate) struct Leisure(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<LeisureJob>,
    bytes: usize,
    /// True while a task works on the queue.
    is_worked_on: bool,
}

impl LeisureJob {
    fn bytes(&self) -> usize {
        self.id.len() + self.system.len()
    }

    fn has_key(&self, other: &Self) -> bool {
        (&self.tenant, &self.id) == (&other.tenant, &other.id)
    }
}

impl Leisure {
    /// Checks that a job has room.
    ///
    /// # Errors
    /// Refuses if too much waits already.
    pub(crate) fn check(&self, system: &str) -> Result<(), Refusal> {
        if self.0.lock().bytes + system.len() <= MOST {
            return Ok(());
        }
        let reason =
            "too many documents wait to be computed; try again later, or register without a system prompt";
        Err(Refusal { code: Some("rate_limit_exceeded"), ..Refusal::new(Kind::Overloaded, reason) })
    }

    /// Adds a job. A job for the same document that waits is replaced. Returns true if the caller must work on the queue.
    fn add(&self, job: LeisureJob) -> bool {
        let mut queue = self.0.lock();
        queue.bytes += job.bytes();
        match queue.jobs.iter_mut().find(|waiting| waiting.has_key(&job)) {
            Some(waiting) => {
                let old = std::mem::replace(waiting, job);
                queue.bytes -= old.bytes();
            }
            None => queue.jobs.push_back(job),
        }
        !std::mem::replace(&mut queue.is_worked_on, true)
    }

    /// Takes the next job. Without one, the caller no longer works on the queue.
    fn take(&self) -> Option<LeisureJob> {
        let mut queue = self.0.lock();
        let job = queue.jobs.pop_front();
        queue.bytes -= job.as_ref().map_or(0, LeisureJob::bytes);
        queue.is_worked_on = job.is_some();
        job
    }
}

impl Service {
    /// Adds a document to those that wait. `compute` computes one.
    pub(crate) fn at_leisure<F: Future<Output = ()> + Send>(
        self: &Arc<Self>,
        job: LeisureJob,
        compute: impl Fn(Arc<Self>, LeisureJob) -> F + Send + Sync + 'static,
    ) {
        if !self.leisure.add(job) {
            return;
        }
        let service = Arc::clone(self);
        tokio::spawn(async move {
            while let Some(job) = service.leisure.take() {
                let idle = async {
                    while service.seats.taken() > 0 || !service.engine.last_step().is_idle() {
                        tokio::time::sleep(LOOK).await;
                    }
                };
                let _ = tokio::time::timeout(PATIENCE, idle).await;
                // What waits behind a job that panics is computed all the same.
                let _ = AssertUnwindSafe(compute(Arc::clone(&service), job)).catch_unwind().await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_waits_once_and_what_waits_is_limited() {
        let leisure = Leisure::default();
        let job = |id: &str, system: &str| LeisureJob {
            tenant: None,
            id: id.to_owned(),
            system: system.to_owned(),
        };
        assert!(leisure.add(job("a", "one")) && !leisure.add(job("b", "two")));
        assert!(!leisure.add(job("a", "three")));
        let other = LeisureJob { tenant: Some("alice".into()), ..job("a", "four") };
        assert!(!leisure.add(other.clone()));
        leisure.check(&"a".repeat(MOST - 20)).unwrap();
        assert_eq!(leisure.check(&"a".repeat(MOST)).unwrap_err().kind, Kind::Overloaded);
        let all: Vec<LeisureJob> = std::iter::from_fn(|| leisure.take()).collect();
        assert_eq!(all, [job("a", "three"), job("b", "two"), other]);
        assert_eq!(leisure.0.lock().bytes, 0);
        assert!(leisure.add(job("a", "one")), "the queue is no longer worked on");
    }
}
