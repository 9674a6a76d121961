//! Registered documents that wait to be computed, one after another, while nobody else wants the engine.

use std::collections::{HashMap, VecDeque};
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
    /// The text of the registration, which is over if the document has another one, even an equal one.
    pub(crate) text: Arc<str>,
}

/// The documents that wait, in the order of their registration.
#[derive(Debug, Default)]
pub(crate) struct Leisure(Mutex<Queue>);

/// A tenant's document: the tag of the tenant, and the ID.
pub(crate) type Place = (Option<Arc<str>>, String);

#[derive(Debug, Default)]
struct Queue {
    places: VecDeque<Place>,
    /// The system prompts and the texts of the documents in the queue.
    waiting: HashMap<Place, (String, Arc<str>)>,
    bytes: usize,
    /// True while a task works on the queue.
    is_worked_on: bool,
    /// True while a document is computed.
    is_computing: bool,
    /// The number of those who want nothing to be computed now.
    pauses: usize,
}

/// The next thing that a task does which works on the queue.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Compute(LeisureJob),
    Wait,
    /// Nothing waits, and the task no longer works on the queue.
    End,
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

    /// Returns whether a job of no client's has room: in half of the bytes, or alone.
    pub(crate) fn has_half(&self, system: &str) -> bool {
        let bytes = self.0.lock().bytes;
        bytes == 0 || bytes + system.len() <= MOST / 2
    }

    /// Adds a job. A job for the same document that waits is replaced. Returns true if the caller must work on the queue.
    fn add(&self, job: LeisureJob) -> bool {
        let LeisureJob { tenant, id, system, text } = job;
        let (place, bytes) = ((tenant, id), system.len());
        let mut queue = self.0.lock();
        queue.bytes += bytes;
        match queue.waiting.insert(place.clone(), (system, text)) {
            Some((old, _)) => queue.bytes -= old.len(),
            None => queue.places.push_back(place),
        }
        !std::mem::replace(&mut queue.is_worked_on, true)
    }

    /// Removes the job for a document, if it waits.
    pub(crate) fn remove(&self, place: &Place) {
        let mut queue = self.0.lock();
        if let Some((system, _)) = queue.waiting.remove(place) {
            queue.bytes -= system.len();
            queue.places.retain(|other| other != place);
        }
    }

    /// Takes the next job, which the caller computes.
    fn take(&self) -> Next {
        let mut queue = self.0.lock();
        if queue.pauses > 0 {
            return Next::Wait;
        }
        let taken = queue.places.pop_front().and_then(|place| queue.waiting.remove_entry(&place));
        (queue.is_worked_on, queue.is_computing) = (taken.is_some(), taken.is_some());
        let Some(((tenant, id), (system, text))) = taken else { return Next::End };
        queue.bytes -= system.len();
        Next::Compute(LeisureJob { tenant, id, system, text })
    }

    /// Ends the computing of a document.
    fn computed(&self) {
        self.0.lock().is_computing = false;
    }

    /// Lets no document be computed until [`resume`](Self::resume), and waits for the one that is being computed.
    pub(crate) async fn pause(&self) {
        self.0.lock().pauses += 1;
        while self.0.lock().is_computing {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Ends a pause.
    pub(crate) fn resume(&self) {
        let mut queue = self.0.lock();
        queue.pauses = queue.pauses.saturating_sub(1);
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
            loop {
                let idle = async {
                    while service.seats.taken() > 0 || !service.engine.last_step().is_idle() {
                        tokio::time::sleep(LOOK).await;
                    }
                };
                let _ = tokio::time::timeout(PATIENCE, idle).await;
                let next = if service.is_asleep() { Next::Wait } else { service.leisure.take() };
                match next {
                    Next::Compute(job) => {
                        // What waits behind a job that panics is computed all the same.
                        let _ = AssertUnwindSafe(compute(Arc::clone(&service), job)).catch_unwind().await;
                        service.leisure.computed();
                    }
                    Next::Wait => tokio::time::sleep(LOOK).await,
                    Next::End => return,
                }
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
            text: "text".into(),
        };
        assert!(leisure.add(job("a", "one")) && !leisure.add(job("b", "two")));
        assert!(!leisure.add(job("a", "three")));
        let other = LeisureJob { tenant: Some("alice".into()), ..job("a", "four") };
        assert!(!leisure.add(other.clone()));
        leisure.check(&"a".repeat(MOST - 20)).unwrap();
        assert_eq!(leisure.check(&"a".repeat(MOST)).unwrap_err().kind, Kind::Overloaded);
        assert!(!leisure.add(job("c", "five")));
        leisure.remove(&(None, "c".to_owned()));
        leisure.remove(&(None, "c".to_owned()));
        leisure.0.lock().pauses = 1;
        assert_eq!(leisure.take(), Next::Wait);
        leisure.resume();
        for expected in [job("a", "three"), job("b", "two"), other] {
            assert_eq!(leisure.take(), Next::Compute(expected));
        }
        assert!(leisure.0.lock().is_computing);
        assert_eq!(leisure.take(), Next::End);
        assert_eq!(leisure.0.lock().bytes, 0);
        assert!(leisure.add(job("a", "one")), "the queue is no longer worked on");
    }
}
