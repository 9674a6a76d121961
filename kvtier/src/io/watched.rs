//! A disk that knows since when its requests have been under way.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::{Direction, DiskIo, IoChoice, IoEnd, IoRequest, OnEnd, Pages};

/// A disk below, with the times at which it was asked to read, to write, to sync, or about its size. Nothing waits for
/// the answers here: whoever wants to give up looks at [`oldest`](Self::oldest) or [`oldest_write`](Self::oldest_write).
#[derive(Debug)]
pub(crate) struct Watched {
    below: Box<dyn DiskIo>,
    requests: Arc<Mutex<Requests>>,
}

/// The requests and syncs that have not ended, by their numbers in the order of their starts.
#[derive(Debug, Default)]
struct Requests {
    started: u64,
    under_way: BTreeMap<u64, (Direction, Instant)>,
}

impl Requests {
    fn start(&mut self, direction: Direction) -> u64 {
        self.started += 1;
        self.under_way.insert(self.started, (direction, Instant::now()));
        self.started
    }
}

impl Watched {
    /// Watches a disk.
    pub(crate) fn new(below: Box<dyn DiskIo>) -> Self {
        Self { below, requests: Arc::default() }
    }

    /// Calls the disk, and remembers the call until it has returned.
    fn watch<T>(&self, direction: Direction, call: impl FnOnce(&dyn DiskIo) -> T) -> T {
        let number = self.requests.lock().start(direction);
        let returned = call(&*self.below);
        self.requests.lock().under_way.remove(&number);
        returned
    }

    /// Returns the time at which the oldest request or sync that has not ended was started.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.requests.lock().under_way.values().next().map(|&(_, since)| since)
    }

    /// Returns the time at which the oldest write or sync that has not ended was started.
    pub(crate) fn oldest_write(&self) -> Option<Instant> {
        let requests = self.requests.lock();
        let mut writes = requests.under_way.values().filter(|(direction, _)| *direction == Direction::Write);
        writes.next().map(|&(_, since)| since)
    }
}

impl DiskIo for Watched {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        let mut watched = self.requests.lock();
        let numbers: Vec<u64> = requests.iter().map(|request| watched.start(request.direction)).collect();
        drop(watched);
        let watched = Arc::clone(&self.requests);
        let on_end = move |end: IoEnd| {
            if let Some(number) = numbers.get(end.index) {
                watched.lock().under_way.remove(number);
            }
            on_end(end);
        };
        self.below.start(requests, Arc::new(on_end));
    }

    fn pages(&self, count: usize) -> Pages {
        self.below.pages(count)
    }

    fn choice(&self) -> Option<&IoChoice> {
        self.below.choice()
    }

    fn size(&self) -> io::Result<u64> {
        self.watch(Direction::Read, |below| below.size())
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.watch(Direction::Write, |below| below.resize(bytes))
    }

    fn sync(&self) -> io::Result<()> {
        self.watch(Direction::Write, |below| below.sync())
    }
}
