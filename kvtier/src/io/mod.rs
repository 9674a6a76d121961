//! Positioned reads and writes of whole pages, many at a time.
//!
//! Callers hand their memory over with each request and get it back when the request ends. A caller that stops
//! waiting therefore never frees memory that the kernel may still write.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

#[allow(unsafe_code, reason = "memory is advised, and divided by addresses")]
mod area;
mod file;
mod pages;
mod place;
mod reader;
mod threads;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "the kernel reads and writes memory through pointers")]
mod uring;
mod watched;
mod way;
mod window;

pub(crate) use area::{LARGE, Piece};
pub use file::FileIo;
pub use pages::{PAGE, Pages};
pub(crate) use reader::ReadOnly;
pub(crate) use watched::Watched;
pub use way::{IoChoice, IoWay};
pub(crate) use window::{Window, WriteGroup};

/// The number of requests that a file has under way at once, apart from a few of a single page. Others wait for their turn.
pub const DEPTH: usize = 16;

/// The direction of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the disk to memory.
    Read,
    /// From memory to the disk.
    Write,
}

/// A read or a write of whole pages.
#[derive(Debug)]
pub struct IoRequest {
    /// Whether to read or to write.
    pub direction: Direction,
    /// The offset in the file, a multiple of [`PAGE`].
    pub offset: u64,
    /// The memory.
    pub pages: Pages,
}

impl IoRequest {
    /// Returns whether the request overtakes those that wait, because it is a single page, which takes the disk no time. Most
    /// of them are headers, and whoever writes a header has written everything else.
    fn goes_first(&self) -> bool {
        self.pages.bytes().len() == PAGE
    }
}

/// The end of a request: its index in the call, its memory, and how it went.
#[derive(Debug)]
pub struct IoEnd {
    /// The index of the request in its call.
    pub index: usize,
    /// The memory. After a failed read, its contents are undefined.
    pub pages: Pages,
    /// The system's error, or [`io::ErrorKind::UnexpectedEof`] for a short read or write.
    pub result: io::Result<()>,
}

/// Called once for each request when it ends, on any thread.
pub type OnEnd = Arc<dyn Fn(IoEnd) + Send + Sync>;

/// A file of fixed size that reads and writes pages at any offset, with several requests under way.
pub trait DiskIo: fmt::Debug + Send + Sync {
    /// Starts requests and returns without waiting for them. Requests may run in any order. Each ends with its own memory.
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd);

    /// Returns memory for a request, with undefined contents. Requests with this memory can be faster.
    fn pages(&self, count: usize) -> Pages {
        Pages::new(count)
    }

    /// Returns the way of I/O, or `None` if it is none of [`IoWay`].
    fn choice(&self) -> Option<&IoChoice> {
        None
    }

    /// Returns the size of the file in bytes.
    ///
    /// # Errors
    /// Returns the system's error.
    fn size(&self) -> io::Result<u64>;

    /// Changes the size of the file, and reserves room on the disk where the file system can.
    ///
    /// # Errors
    /// Returns the system's error, as on a full disk.
    fn resize(&self, bytes: u64) -> io::Result<()>;

    /// Waits until everything that was written before this call survives a loss of power.
    ///
    /// # Errors
    /// Returns the system's error.
    fn sync(&self) -> io::Result<()>;
}

/// The part of [`FileIo`] that differs between the ways of I/O.
trait Transport: fmt::Debug + Send + Sync {
    /// Starts requests, as [`DiskIo::start`] does.
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd);
}

/// The reason why [`run`] returned no memory.
#[derive(Debug)]
pub(crate) enum RunFault {
    /// A request failed.
    Failed(io::Error),
    /// The requests had not ended at the deadline. They go on with their own memory.
    Late,
}

/// Runs requests together, and waits for them until `deadline`, or without a limit.
pub(crate) fn run(
    io: &dyn DiskIo,
    requests: Vec<IoRequest>,
    deadline: Option<Instant>,
) -> Result<Vec<Pages>, RunFault> {
    struct Ends {
        memory: Vec<Option<Pages>>,
        left: usize,
        failed: Option<io::Error>,
    }
    let count = requests.len();
    let ends = Ends { memory: (0..count).map(|_| None).collect(), left: count, failed: None };
    let ends = Arc::new((Mutex::new(ends), Condvar::new()));
    let shared = Arc::clone(&ends);
    io.start(
        requests,
        Arc::new(move |end: IoEnd| {
            let mut ends = shared.0.lock();
            ends.memory[end.index] = Some(end.pages);
            ends.failed = ends.failed.take().or_else(|| end.result.err());
            ends.left -= 1;
            if ends.left == 0 {
                shared.1.notify_all();
            }
        }),
    );
    let mut all = ends.0.lock();
    while all.left > 0 {
        match deadline {
            None => ends.1.wait(&mut all),
            Some(deadline) => {
                if ends.1.wait_until(&mut all, deadline).timed_out() && all.left > 0 {
                    return Err(RunFault::Late);
                }
            }
        }
    }
    match all.failed.take() {
        Some(error) => Err(RunFault::Failed(error)),
        None => Ok(all.memory.drain(..).flatten().collect()),
    }
}
