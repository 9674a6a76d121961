//! Plain direct writes and reads of a file, with which disks are compared.
#![allow(dead_code, reason = "not every benchmark uses everything")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvtier::io::{DEPTH, DiskIo as _, FileIo, Pages};

/// The number of bytes per request.
const REQUEST: usize = 512 << 10;

/// A file that is read and written without a slab, from memory of the same kind as that of a slab.
pub(crate) struct Plain {
    file: File,
    memory: FileIo,
    bytes: u64,
    /// The number of places for so many bytes.
    places: u64,
    /// The number of the place that is written next.
    next: AtomicU64,
}

impl Plain {
    /// Creates a file with `places` places for `bytes` bytes. Each write goes to the next place, because a host can keep
    /// a place that is written again and again in its memory.
    pub(crate) fn new(path: &Path, bytes: u64, places: u64) -> Self {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        #[cfg(target_os = "linux")]
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
        let file = options.open(path).expect("a file for direct I/O");
        let memory = FileIo::open(path, None).expect("memory for direct I/O");
        Self { file, memory, bytes, places, next: AtomicU64::new(0) }
    }

    /// Serves all requests for a place on [`DEPTH`] threads, each with memory that it uses again and again. Returns the
    /// time in seconds.
    fn run(&self, place: u64, serve: impl Fn(&File, &mut [u8], u64) + Sync) -> f64 {
        let first = place % self.places * self.bytes;
        let next = AtomicU64::new(0);
        // The memory is there before the clock starts, as that of a slab is.
        let mut memory: Vec<Pages> = (0..DEPTH).map(|_| self.memory.pages(REQUEST / 4096)).collect();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for pages in &mut memory {
                scope.spawn(|| {
                    loop {
                        let offset = next.fetch_add(REQUEST as u64, Ordering::Relaxed);
                        if offset >= self.bytes {
                            return;
                        }
                        serve(&self.file, pages.bytes_mut(), first + offset);
                    }
                });
            }
        });
        start.elapsed().as_secs_f64()
    }

    /// Serves all requests for a place on [`DEPTH`] threads, each with a part of `memory` of its own. Returns the time in
    /// seconds.
    fn run_all(&self, place: u64, memory: &mut [u8], serve: impl Fn(&File, &mut [u8], u64) + Sync) -> f64 {
        let first = place % self.places * self.bytes;
        let parts = Mutex::new(memory.chunks_mut(REQUEST).zip((first..).step_by(REQUEST)));
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..DEPTH {
                scope.spawn(|| {
                    loop {
                        let Some((part, offset)) = parts.lock().expect("no panic").next() else { return };
                        serve(&self.file, part, offset);
                    }
                });
            }
        });
        start.elapsed().as_secs_f64()
    }

    /// Syncs, and returns `seconds` and the time that this took.
    fn synced(&self, seconds: f64) -> f64 {
        let start = Instant::now();
        self.file.sync_data().expect("a sync");
        seconds + start.elapsed().as_secs_f64()
    }

    /// Writes the next place, and returns the time in seconds.
    pub(crate) fn write(&self) -> f64 {
        let place = self.next.fetch_add(1, Ordering::Relaxed);
        self.synced(self.run(place, write))
    }

    /// Writes the next place from as much memory, and returns the time in seconds.
    pub(crate) fn write_from(&self, memory: &mut [u8]) -> f64 {
        let place = self.next.fetch_add(1, Ordering::Relaxed);
        self.synced(self.run_all(place, memory, write))
    }

    /// Reads the place that was written last, and returns the time in seconds.
    pub(crate) fn read(&self) -> f64 {
        self.run(self.next.load(Ordering::Relaxed) - 1, read)
    }

    /// Reads the place that was written last to as much memory, and returns the time in seconds.
    pub(crate) fn read_to(&self, memory: &mut [u8]) -> f64 {
        self.run_all(self.next.load(Ordering::Relaxed) - 1, memory, read)
    }
}

fn write(file: &File, bytes: &mut [u8], offset: u64) {
    file.write_all_at(bytes, offset).expect("a plain write");
}

fn read(file: &File, bytes: &mut [u8], offset: u64) {
    file.read_exact_at(bytes, offset).expect("a plain read");
}
