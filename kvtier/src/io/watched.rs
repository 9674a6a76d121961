//! A disk that knows since when its writes have been under way.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::{Direction, DiskIo, IoChoice, IoEnd, IoRequest, OnEnd, Pages};

/// A disk below that is asked to write and to sync, with the times at which it was asked. Nothing waits for the
/// answers here: whoever wants to give up looks at [`oldest_write`](Self::oldest_write).
#[derive(Debug)]
pub(crate) struct Watched {
    below: Box<dyn DiskIo>,
    writes: Arc<Mutex<Writes>>,
}

/// The writes and syncs that have not ended, by their numbers in the order of their starts.
#[derive(Debug, Default)]
struct Writes {
    started: u64,
    under_way: BTreeMap<u64, Instant>,
}

impl Writes {
    fn start(&mut self) -> u64 {
        self.started += 1;
        self.under_way.insert(self.started, Instant::now());
        self.started
    }
}

impl Watched {
    /// Watches the writes of a disk.
    pub(crate) fn new(below: Box<dyn DiskIo>) -> Self {
        Self { below, writes: Arc::default() }
    }

    /// Returns the time at which the oldest write or sync that has not ended was started.
    pub(crate) fn oldest_write(&self) -> Option<Instant> {
        self.writes.lock().under_way.values().next().copied()
    }
}

impl DiskIo for Watched {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        let mut writes = self.writes.lock();
        let number = |request: &IoRequest| (request.direction == Direction::Write).then(|| writes.start());
        let numbers: Vec<Option<u64>> = requests.iter().map(number).collect();
        drop(writes);
        if numbers.iter().all(Option::is_none) {
            return self.below.start(requests, on_end);
        }
        let writes = Arc::clone(&self.writes);
        let on_end = move |end: IoEnd| {
            if let Some(number) = numbers[end.index] {
                writes.lock().under_way.remove(&number);
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
        self.below.size()
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.below.resize(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let number = self.writes.lock().start();
        let synced = self.below.sync();
        self.writes.lock().under_way.remove(&number);
        synced
    }
}
