//! Plain direct writes and reads of a file, with which disks are compared.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvtier::io::{DEPTH, Pages};

/// The number of bytes per request.
const REQUEST: usize = 256 << 10;

/// A file that is read and written without a slab.
pub(crate) struct Plain {
    file: File,
    bytes: u64,
}

impl Plain {
    pub(crate) fn new(path: &Path, bytes: u64) -> Self {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        #[cfg(target_os = "linux")]
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
        Self { file: options.open(path).expect("a file for direct I/O"), bytes }
    }

    /// Serves all requests on [`DEPTH`] threads, and returns the time in seconds.
    fn run(&self, serve: impl Fn(&File, &mut [u8], u64) + Sync) -> f64 {
        let next = AtomicU64::new(0);
        // The memory is there before the clock starts, as that of a slab is.
        let mut memory: Vec<Pages> = (0..DEPTH).map(|_| Pages::new(REQUEST / 4096)).collect();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for pages in &mut memory {
                scope.spawn(|| {
                    loop {
                        let offset = next.fetch_add(REQUEST as u64, Ordering::Relaxed);
                        if offset >= self.bytes {
                            return;
                        }
                        serve(&self.file, pages.bytes_mut(), offset);
                    }
                });
            }
        });
        start.elapsed().as_secs_f64()
    }

    pub(crate) fn write(&self) -> f64 {
        let written =
            self.run(|file, bytes, offset| file.write_all_at(bytes, offset).expect("a plain write"));
        let start = Instant::now();
        self.file.sync_data().expect("a sync");
        written + start.elapsed().as_secs_f64()
    }

    pub(crate) fn read(&self) -> f64 {
        self.run(|file, bytes, offset| file.read_exact_at(bytes, offset).expect("a plain read"))
    }
}
