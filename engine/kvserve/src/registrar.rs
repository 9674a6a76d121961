//! The thread that changes registered documents, one change after another, in memory and in their file.
//!
//! Changes wait for the disk. On a thread of their own, they delay neither steps nor texts nor connections.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tracing::{Span, error, warn};

use crate::journal::Journal;
use crate::refusal::{Kind, Refusal};
use crate::service::unix_time_ms;

/// The longest time to wait for the disk at the end of the server.
const LAST_WRITE: Duration = Duration::from_secs(2);

/// A change. Without a file, documents are kept in memory alone.
type Job = Box<dyn FnOnce(&mut Option<Journal>) + Send>;

/// The thread that changes registered documents.
///
/// # Drop behaviour
/// Makes the changes that wait, and gives up the file. If the disk takes longer than two seconds, the thread goes on alone.
#[derive(Debug)]
pub(crate) struct Registrar {
    handle: RegistrarHandle,
    /// Told when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

/// The most changes that wait. Each of them has a place among the requests of the server, and a disk can hang.
const WAITING: usize = 64;

/// Sends changes to the thread.
#[derive(Debug, Clone)]
pub(crate) struct RegistrarHandle {
    jobs: Arc<Mutex<Option<Sender<Job>>>>,
    waiting: Arc<AtomicUsize>,
}

impl Registrar {
    /// Starts the thread. Changes may start tasks of the runtime.
    pub(crate) fn start(journal: Option<Journal>, runtime: Handle) -> std::io::Result<Self> {
        let (sender, jobs) = channel();
        let (ends, ended) = channel();
        thread::Builder::new().name("kv-documents".to_owned()).spawn(move || {
            let _runtime = runtime.enter();
            run(journal, &jobs);
            // Nobody may wait.
            let _ = ends.send(());
        })?;
        let handle = RegistrarHandle { jobs: Arc::new(Mutex::new(Some(sender))), waiting: Arc::default() };
        Ok(Self { handle, ended: Mutex::new(ended) })
    }

    pub(crate) fn handle(&self) -> RegistrarHandle {
        self.handle.clone()
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        // Without a sender, the thread ends after the changes that wait.
        self.handle.jobs.lock().take();
        if self.ended.lock().recv_timeout(LAST_WRITE).is_err() {
            warn!("the disk does not answer, so the last changes of the registered documents may be lost");
        }
    }
}

impl RegistrarHandle {
    /// Makes a change after all earlier ones, and returns its result. The change is made even if its caller goes away. The
    /// guard lives until then.
    ///
    /// # Errors
    /// Returns the refusal of the change, that of a change that panicked or came after the end of the thread, or one because
    /// too many changes wait.
    pub(crate) async fn change<R: Send + 'static, G: Send + 'static>(
        &self,
        guard: G,
        change: impl FnOnce(&mut Option<Journal>) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        let waiting = Arc::clone(&self.waiting);
        if waiting.fetch_add(1, Ordering::Relaxed) >= WAITING {
            waiting.fetch_sub(1, Ordering::Relaxed);
            let reason = "too many changes of registered documents wait for the disk; try again later";
            return Err(Refusal {
                code: Some("rate_limit_exceeded"),
                ..Refusal::new(Kind::Overloaded, reason)
            });
        }
        let waits = Waits(waiting);
        let (sender, result) = oneshot::channel();
        let span = Span::current();
        let job: Job = Box::new(move |journal| {
            let result = span.in_scope(|| change(journal));
            drop((guard, waits));
            // The caller may have gone.
            let _ = sender.send(result);
        });
        let sent = self.jobs.lock().as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            return Err(Refusal::shutting_down());
        }
        result.await.map_err(|_| Refusal::failed())?
    }
}

/// A change that waits or is being made.
struct Waits(Arc<AtomicUsize>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn run(mut journal: Option<Journal>, jobs: &Receiver<Job>) {
    for job in jobs {
        if let Some(journal) = &mut journal {
            journal.expire(unix_time_ms());
        }
        if catch_unwind(AssertUnwindSafe(|| job(&mut journal))).is_err() {
            error!("a change of the registered documents panicked");
        }
        let compacted = AssertUnwindSafe(|| journal.as_mut().map(Journal::compact_if_due));
        if catch_unwind(compacted).is_err() {
            error!("the registered documents could not be written again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_made_after_its_caller_has_gone_and_after_one_that_panics() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let registrar = Registrar::start(None, runtime.handle().clone()).unwrap();
        let handle = registrar.handle();
        let guard = Arc::new(());
        let (release, released) = channel();
        let (done, order) = channel();
        runtime.block_on(async {
            let begin = done.clone();
            let mut gone = Box::pin(handle.change(Arc::clone(&guard), move |_| {
                released.recv().unwrap();
                begin.send(1).unwrap();
                Ok(())
            }));
            assert!(futures_util::FutureExt::now_or_never(&mut gone).is_none());
            drop(gone);
            assert_eq!(Arc::strong_count(&guard), 2, "the guard lives until the change is made");
            release.send(()).unwrap();
            let panicked: Result<(), Refusal> = handle.change((), |_| panic!("on purpose")).await;
            assert_eq!(panicked, Err(Refusal::failed()));
            let after = handle.change((), move |_| {
                done.send(2).unwrap();
                Ok(())
            });
            after.await.unwrap();
        });
        let waiting = |_: &mut Option<Journal>| -> Result<(), Refusal> { Ok(()) };
        let (hold, held) = channel::<()>();
        let results = runtime.block_on(async {
            let first = handle.change((), move |_| {
                held.recv().unwrap();
                Ok(())
            });
            let more: Vec<_> = (0..WAITING).map(|_| handle.change((), waiting)).collect();
            let mut all = Box::pin(futures_util::future::join(first, futures_util::future::join_all(more)));
            assert!(futures_util::FutureExt::now_or_never(&mut all).is_none());
            hold.send(()).unwrap();
            all.await.1
        });
        let refused = results.iter().filter(|result| result.is_err()).count();
        assert_eq!(refused, 1, "the one more than may wait");
        assert_eq!(order.iter().collect::<Vec<i32>>(), [1, 2]);
        assert_eq!(Arc::strong_count(&guard), 1);
        drop(registrar);
        let late = runtime.block_on(handle.change((), |_| Ok(())));
        assert_eq!(late, Err(Refusal::shutting_down()));
    }
}
