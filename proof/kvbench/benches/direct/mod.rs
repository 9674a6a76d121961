//! Plain direct writes and reads of a file, with which disks are compared.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvtier::io::{DEPTH, DiskIo as _, FileIo, Pages};

/// The number of bytes per request.
const REQUEST: usize = 256 << 10;

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

    /// Serves all requests for a place on [`DEPTH`] threads, and returns the time in seconds.
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

    /// Writes the next place, and returns the time in seconds.
    pub(crate) fn write(&self) -> f64 {
        let place = self.next.fetch_add(1, Ordering::Relaxed);
        let written =
            self.run(place, |file, bytes, offset| file.write_all_at(bytes, offset).expect("a plain write"));
        let start = Instant::now();
        self.file.sync_data().expect("a sync");
        written + start.elapsed().as_secs_f64()
    }

    /// Reads the place that was written last, and returns the time in seconds.
    pub(crate) fn read(&self) -> f64 {
        let place = self.next.load(Ordering::Relaxed) - 1;
        self.run(place, |file, bytes, offset| file.read_exact_at(bytes, offset).expect("a plain read"))
    }
}
