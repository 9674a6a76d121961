//! A file whose requests run on threads with `pread` and `pwrite`.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::{Direction, DiskIo, IoEnd, IoRequest, OnEnd, place};

/// A file that bypasses the page cache where the file system allows it. A few threads serve the requests in the
/// order in which they were started.
///
/// # Drop behaviour
/// Waits for the requests that have been started.
#[derive(Debug)]
pub struct FileIo {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

/// The state that the threads share.
#[derive(Debug)]
struct Queue {
    file: File,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<(usize, IoRequest, OnEnd)>,
    closed: bool,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} requests", self.requests.len())
    }
}

impl FileIo {
    /// The number of requests that the disk serves at once.
    pub const DEPTH: usize = 8;

    /// Opens or creates a file for reading and writing.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn open(path: &Path) -> io::Result<Self> {
        place::open(path).map(Self::new)
    }

    /// Serves an open file.
    pub fn new(file: File) -> Self {
        let queue = Queue { file, waiting: Mutex::default(), changed: Condvar::new() };
        let queue = Arc::new(queue);
        let serve = |_| {
            let queue = Arc::clone(&queue);
            std::thread::spawn(move || queue.serve())
        };
        let threads = (0..Self::DEPTH).map(serve).collect();
        Self { queue, threads }
    }
}

impl DiskIo for FileIo {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        let mut waiting = self.queue.waiting.lock();
        let requests = requests.into_iter().enumerate();
        waiting.requests.extend(requests.map(|(index, request)| (index, request, Arc::clone(&on_end))));
        drop(waiting);
        self.queue.changed.notify_all();
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.queue.file.metadata()?.len())
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        let file = &self.queue.file;
        if bytes < self.size()? {
            file.set_len(bytes)?;
        }
        if bytes > 0 {
            place::reserve(file, bytes)?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.queue.file.sync_data()
    }
}

impl Queue {
    /// Serves requests until the queue is closed and empty.
    fn serve(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            let (index, request, on_end) = loop {
                match waiting.requests.pop_front() {
                    Some(next) => break next,
                    None if waiting.closed => return,
                    None => self.changed.wait(&mut waiting),
                }
            };
            drop(waiting);
            let IoRequest { direction, offset, mut pages } = request;
            let result = match direction {
                Direction::Read => place::read(&self.file, pages.bytes_mut(), offset),
                Direction::Write => place::write(&self.file, pages.bytes(), offset),
            };
            on_end(IoEnd { index, pages, result });
        }
    }
}

impl Drop for FileIo {
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
