//! Work that takes processor time, on the threads for such work.

use std::sync::Arc;

use tracing::Span;

use crate::refusal::{Kind, Refusal};

/// Runs work on a thread for such work, and returns the guard, which lives until the work is done. Work that has not begun
/// when its caller goes away is never done.
///
/// # Errors
/// Returns the refusal of the work, or that of work that panicked.
pub(crate) async fn run<R: Send + 'static, G: Send + 'static>(
    guard: G,
    work: impl FnOnce() -> Result<R, Refusal> + Send + 'static,
) -> Result<(R, G), Refusal> {
    let failed =
        || Refusal::new(Kind::Internal, "the text could not be processed; see the log of the server");
    // Dropped with the caller.
    let caller = Arc::new(());
    let waits = Arc::downgrade(&caller);
    let span = Span::current();
    let done = tokio::task::spawn_blocking(move || {
        let is_awaited = waits.strong_count() > 0;
        let result = is_awaited.then(|| span.in_scope(work));
        (result, guard)
    });
    let (result, guard) = done.await.map_err(|_| failed())?;
    drop(caller);
    Ok((result.ok_or_else(failed)??, guard))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn work_of_a_caller_who_goes_away_before_it_begins_is_not_done() {
        let runtime = tokio::runtime::Builder::new_multi_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let (begun, begins) = channel();
            let (release, released) = channel();
            let busy = tokio::spawn(run((), move || {
                begun.send(()).unwrap();
                released.recv().unwrap();
                Ok(())
            }));
            tokio::task::block_in_place(|| begins.recv().unwrap());
            let (done, stays): (Arc<AtomicBool>, Arc<AtomicBool>) = Default::default();
            let marks = |flag: &Arc<AtomicBool>| {
                let flag = Arc::clone(flag);
                move || {
                    flag.store(true, Ordering::Relaxed);
                    Ok(())
                }
            };
            let guard = Arc::new(());
            let mut gone = Box::pin(run(Arc::clone(&guard), marks(&done)));
            // The work waits for the thread.
            assert!(futures_util::FutureExt::now_or_never(&mut gone).is_none());
            drop(gone);
            let after = tokio::spawn(run((), marks(&stays)));
            release.send(()).unwrap();
            busy.await.unwrap().unwrap();
            after.await.unwrap().unwrap();
            assert!(!done.load(Ordering::Relaxed) && stays.load(Ordering::Relaxed));
            assert_eq!(Arc::strong_count(&guard), 1, "the guard is dropped with the work");
        });
    }
}
