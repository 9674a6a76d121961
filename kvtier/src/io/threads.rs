//! Requests that run on threads with `pread` and `pwrite`.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::{DEPTH, Direction, IoEnd, IoRequest, OnEnd, Transport, place};

/// A few threads that serve requests in the order in which they were started.
///
/// # Drop behaviour
/// Waits for the requests that have been started.
#[derive(Debug)]
pub(super) struct ThreadIo {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

/// The state that the threads share.
#[derive(Debug)]
struct Queue {
    file: Arc<File>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<(usize, IoRequest, OnEnd)>,
    /// The number of requests that are being served, without those that [go first](IoRequest::goes_first).
    served: usize,
    closed: bool,
}

impl Waiting {
    /// Takes the next request, unless as many are being served as may be.
    fn next(&mut self) -> Option<(usize, IoRequest, OnEnd)> {
        let (_, request, _) = self.requests.front()?;
        if !request.goes_first() {
            if self.served == DEPTH {
                return None;
            }
            self.served += 1;
        }
        self.requests.pop_front()
    }
}

/// The number of threads beyond [`DEPTH`], for requests that go first.
const FIRST: usize = 4;

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} requests", self.requests.len())
    }
}

impl ThreadIo {
    /// Serves an open file.
    ///
    /// # Errors
    /// Returns the system's error if a thread cannot be started.
    pub(super) fn new(file: Arc<File>) -> io::Result<Self> {
        let queue = Queue { file, waiting: Mutex::default(), changed: Condvar::new() };
        let mut this = Self { queue: Arc::new(queue), threads: Vec::new() };
        for _ in 0..DEPTH + FIRST {
            let queue = Arc::clone(&this.queue);
            let thread = std::thread::Builder::new().name("kvtier-io".to_owned());
            this.threads.push(thread.spawn(move || queue.serve())?);
        }
        Ok(this)
    }
}

impl Transport for ThreadIo {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        let mut waiting = self.queue.waiting.lock();
        let count = requests.len();
        for (index, request) in requests.into_iter().enumerate() {
            let goes_first = request.goes_first();
            let request = (index, request, Arc::clone(&on_end));
            if goes_first {
                waiting.requests.push_front(request);
            } else {
                waiting.requests.push_back(request);
            }
        }
        drop(waiting);
        for _ in 0..count.min(DEPTH) {
            self.queue.changed.notify_one();
        }
    }
}

impl Queue {
    /// Serves requests until the queue is closed and empty.
    fn serve(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            let (index, request, on_end) = loop {
                match waiting.next() {
                    Some(next) => break next,
                    None if waiting.closed && waiting.requests.is_empty() => {
                        // The next thread ends, too.
                        self.changed.notify_one();
                        return;
                    }
                    None => self.changed.wait(&mut waiting),
                }
            };
            drop(waiting);
            let goes_first = request.goes_first();
            let IoRequest { direction, offset, mut pages } = request;
            let result = match direction {
                Direction::Read => place::read(&self.file, pages.bytes_mut(), offset),
                Direction::Write => place::write(&self.file, pages.bytes(), offset),
            };
            self.waiting.lock().served -= usize::from(!goes_first);
            // Another thread goes on while this one tells of the end.
            self.changed.notify_one();
            on_end(IoEnd { index, pages, result });
        }
    }
}

impl Drop for ThreadIo {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.changed.notify_all();
        // The last holder of the file may be one of its own threads, which then ends by itself.
        let own = std::thread::current().id();
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
            // A panicked thread has nothing left to wait for.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Pages;

    #[test]
    fn single_pages_do_not_wait_for_others_to_end() {
        let mut waiting = Waiting::default();
        for pages in std::iter::repeat_n(2, DEPTH + 1).chain([1]) {
            let request = IoRequest { direction: Direction::Write, offset: 0, pages: Pages::new(pages) };
            waiting.requests.push_back((0, request, Arc::new(drop)));
        }
        assert_eq!(std::iter::from_fn(|| waiting.next()).count(), DEPTH);
        waiting.requests.rotate_right(1);
        assert_eq!(std::iter::from_fn(|| waiting.next()).count(), 1);
        waiting.served -= 1;
        assert_eq!((std::iter::from_fn(|| waiting.next()).count(), waiting.requests.len()), (1, 0));
    }
}
