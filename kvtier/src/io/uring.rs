//! Requests that reach the kernel through `io_uring`.
//!
//! ```text
//!   start ──► waiting ──► under way, DEPTH and a few single pages ──► kernel
//!                 ▲  the rest of a short one ◄── one thread that waits for ends ──► on_end
//!                 └──────────────────────────────┘
//! ```
//!
//! The memory of a request is in the list of requests under way until the kernel has reported its end, whether
//! or not somebody still waits for it.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use io_uring::types::Fd;
use io_uring::{IoUring, Probe, opcode, squeue};
use parking_lot::Mutex;

use super::pages::PagePool;
use super::{DEPTH, Direction, IoEnd, IoRequest, OnEnd, Pages, Transport};

/// The number of requests under way, including those that [go first](IoRequest::goes_first).
const PLACES: usize = 2 * DEPTH;

/// The number of entries of the ring: requests under way, and one entry that wakes the thread.
const ENTRIES: u32 = 2 * PLACES as u32;

/// The mark of an entry that only wakes the thread.
const WAKE: u64 = u64::MAX;

/// The largest number of bytes that one entry moves. The rest follows.
const MOST_BYTES: usize = 1 << 30;

/// The time until an operation that the kernel had no memory for is repeated.
const PAUSE: Duration = Duration::from_millis(1);

/// The number of entries that are submitted together. The kernel holds more of them back until it has prepared all, and
/// the disk would have nothing to do in the meantime.
const AT_ONCE: usize = 2;

/// The number of refusals by the kernel after which a caller goes on.
const TRIES: usize = 20;

/// A ring, and the thread that waits for it.
///
/// # Drop behaviour
/// Waits for the requests that have been started.
#[derive(Debug)]
pub(super) struct UringIo {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    ring: IoUring,
    file: Arc<File>,
    /// The memory that is registered with the ring, which is dropped after it.
    registered: Option<Arc<PagePool>>,
    /// Held by the one that adds entries to the ring.
    submitting: Mutex<()>,
    requests: Mutex<Requests>,
}

/// The requests that have not ended.
struct Requests {
    waiting: VecDeque<Request>,
    /// The requests that the kernel works on. The index marks their entries.
    under_way: [Option<Request>; PLACES],
    closed: bool,
}

impl Requests {
    /// Gives the next request that waits a place, unless as many are under way as may be. Returns its mark.
    fn start_next(&mut self) -> Option<(usize, &mut Request)> {
        let large = self.under_way.iter().flatten().filter(|request| !request.goes_first).count();
        let (mark, place) = self.under_way.iter_mut().enumerate().find(|(_, place)| place.is_none())?;
        let request = self.waiting.pop_front()?;
        if !request.goes_first && large == DEPTH {
            self.waiting.push_front(request);
            return None;
        }
        Some((mark, place.insert(request)))
    }
}

struct Request {
    index: usize,
    direction: Direction,
    offset: u64,
    pages: Pages,
    /// The number of bytes that have been moved already.
    done: usize,
    /// True if it overtakes the requests that wait.
    goes_first: bool,
    on_end: OnEnd,
}

impl UringIo {
    /// Creates a ring for an open file. If a pool is given, its memory is registered with the ring. Nothing may
    /// be lent from the pool.
    ///
    /// # Errors
    /// Returns the system's error if the kernel does not permit a ring, or the memory to be locked.
    pub(super) fn new(file: Arc<File>, registered: Option<&Arc<PagePool>>) -> io::Result<Self> {
        let mut ring = IoUring::new(ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE].into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel's io_uring is older than 5.6",
            ));
        }
        if let Some(pool) = registered {
            register(&ring, pool)?;
        }
        // Some systems permit a ring, but do not permit anything to be done with it.
        // SAFETY: the entry has no memory.
        let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        pushed.map_err(io::Error::other)?;
        ring.submit_and_wait(1)?;
        ring.completion().for_each(drop);
        let requests =
            Requests { waiting: VecDeque::new(), under_way: [const { None }; PLACES], closed: false };
        let (registered, submitting) = (registered.cloned(), Mutex::new(()));
        let requests = Mutex::new(requests);
        let shared = Arc::new(Shared { ring, file, registered, submitting, requests });
        let waiting = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvtier-io".to_owned());
        let thread = Some(thread.spawn(move || waiting.wait_for_ends())?);
        Ok(Self { shared, thread })
    }
}

/// Registers the memory of a pool.
fn register(ring: &IoUring, pool: &PagePool) -> io::Result<()> {
    pool.with_prepared(|pieces| {
        let areas = pieces
            .iter_mut()
            .map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() });
        let areas: Vec<libc::iovec> = areas.collect();
        // SAFETY: the memory of a pool keeps its address as long as the pool lives, and the ring holds the pool.
        unsafe { ring.submitter().register_buffers(&areas) }
    })
    .map_err(|error| match error.kind() {
        io::ErrorKind::OutOfMemory => {
            let needed = usize::from(PagePool::PREPARED) * PagePool::PAGES * super::PAGE / 1024;
            io::Error::new(
                error.kind(),
                format!("{error}; {needed} KiB of memory must be locked, see `ulimit -l`"),
            )
        }
        _ => error,
    })
}

impl Transport for UringIo {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        let requests = requests.into_iter().enumerate().map(|(index, request)| {
            let goes_first = request.goes_first();
            let IoRequest { direction, offset, pages } = request;
            Request { index, direction, offset, pages, done: 0, goes_first, on_end: Arc::clone(&on_end) }
        });
        let mut all = self.shared.requests.lock();
        for request in requests {
            if request.goes_first {
                all.waiting.push_front(request);
            } else {
                all.waiting.push_back(request);
            }
        }
        drop(all);
        self.shared.submit();
    }
}

impl Shared {
    /// Hands requests to the kernel, as many as may be under way.
    fn submit(&self) {
        let submitting = self.submitting.lock();
        let mut entries = Vec::new();
        let mut requests = self.requests.lock();
        while let Some((mark, request)) = requests.start_next() {
            let entry = request.entry(Fd(self.file.as_raw_fd()), self.registered.as_ref());
            entries.push(entry.user_data(mark as u64));
        }
        drop(requests);
        self.push(&entries);
        drop(submitting);
    }

    /// Adds entries to the ring, and tells the kernel. The caller guarantees that nobody else adds entries, and
    /// that memory in the entries stays where it is until the kernel has reported their ends.
    fn push(&self, entries: &[squeue::Entry]) {
        let mut tries = TRIES;
        for entries in entries.chunks(AT_ONCE) {
            // SAFETY: no other queue exists, because only the holder of `submitting` has one. Requests stay in
            // `under_way`, with their memory, until their ends have been reported.
            let pushed = unsafe { self.ring.submission_shared().push_multiple(entries) };
            debug_assert!(pushed.is_ok(), "the ring has more entries than there are requests under way");
            // The kernel can stop in the middle, as when it is out of memory. What is left is submitted together with
            // later entries, so that a caller is not held up beyond its deadline.
            // SAFETY: the caller holds `submitting`, so no other queue exists.
            while tries > 0 && !unsafe { self.ring.submission_shared().is_empty() } {
                if self.ring.submit().is_err() {
                    std::thread::sleep(PAUSE);
                    tries -= 1;
                }
            }
        }
    }

    /// Waits for the ends of requests until the ring is closed and nothing is under way.
    fn wait_for_ends(&self) {
        let mut ended = Vec::new();
        loop {
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.kind() != io::ErrorKind::Interrupted
            {
                std::thread::sleep(PAUSE);
            }
            // SAFETY: only this thread reads ends.
            let ends = unsafe { self.ring.completion_shared() };
            ended.extend(ends.map(|end| (end.user_data(), end.result())));
            let mut requests = self.requests.lock();
            let Requests { waiting, under_way, .. } = &mut *requests;
            let take = |(mark, result): (u64, i32)| {
                let request = under_way.get_mut(usize::try_from(mark).ok()?)?.take()?;
                request.moved(result).map_err(|request| waiting.push_front(request)).ok()
            };
            let ends: Vec<(OnEnd, IoEnd)> = ended.drain(..).filter_map(take).collect();
            let is_last = requests.closed
                && requests.waiting.is_empty()
                && requests.under_way.iter().all(Option::is_none);
            let has_more = !requests.waiting.is_empty();
            drop(requests);
            if has_more {
                self.submit();
            }
            for (on_end, end) in ends {
                on_end(end);
            }
            if is_last {
                return;
            }
        }
    }
}

impl Request {
    /// Returns an entry that moves the rest of this request.
    fn entry(&mut self, file: Fd, registered: Option<&Arc<PagePool>>) -> squeue::Entry {
        let number = registered.and_then(|pool| self.pages.number_in(pool));
        let rest = &mut self.pages.bytes_mut()[self.done..];
        let (memory, len) = (rest.as_mut_ptr(), rest.len().min(MOST_BYTES) as u32);
        let offset = self.offset + self.done as u64;
        match (self.direction, number) {
            (Direction::Read, None) => opcode::Read::new(file, memory, len).offset(offset).build(),
            (Direction::Write, None) => opcode::Write::new(file, memory, len).offset(offset).build(),
            (Direction::Read, Some(number)) => {
                opcode::ReadFixed::new(file, memory, len, number).offset(offset).build()
            }
            (Direction::Write, Some(number)) => {
                opcode::WriteFixed::new(file, memory, len, number).offset(offset).build()
            }
        }
    }

    /// Notes what the kernel reports: a number of bytes, or a negated error. Returns the end of the request, or
    /// the request as `Err` if it has not ended.
    fn moved(mut self, result: i32) -> Result<(OnEnd, IoEnd), Self> {
        let result = match usize::try_from(result) {
            Err(_) => match io::Error::from_raw_os_error(-result) {
                error if is_passing(&error) => return Err(self),
                error => Err(error),
            },
            Ok(0) if self.done < self.pages.bytes().len() => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.done += count;
                if self.done < self.pages.bytes().len() {
                    return Err(self);
                }
                Ok(())
            }
        };
        let Self { index, pages, on_end, .. } = self;
        Ok((on_end, IoEnd { index, pages, result }))
    }
}

/// Returns true for errors after which the same request can succeed. The kernel cancels a request whose thread
/// has ended; the thread that waits for ends starts the request again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

impl Drop for UringIo {
    fn drop(&mut self) {
        let submitting = self.shared.submitting.lock();
        self.shared.requests.lock().closed = true;
        self.shared.push(&[opcode::Nop::new().build().user_data(WAKE)]);
        drop(submitting);
        // The last holder of the file may be its own thread, which then ends by itself.
        let own = std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != own) {
            // A panicked thread has nothing left to wait for.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn request(pages: usize) -> Request {
        let request = IoRequest { direction: Direction::Write, offset: 0, pages: Pages::new(pages) };
        let goes_first = request.goes_first();
        let IoRequest { direction, offset, pages } = request;
        Request { index: 0, direction, offset, pages, done: 0, goes_first, on_end: Arc::new(drop) }
    }

    #[test]
    fn single_pages_do_not_wait_for_the_places_of_others() {
        let mut requests =
            Requests { waiting: VecDeque::new(), under_way: [const { None }; PLACES], closed: false };
        let start_all =
            |requests: &mut Requests| std::iter::from_fn(|| requests.start_next().map(drop)).count();
        requests.waiting.extend((0..DEPTH + 3).map(|_| request(2)));
        assert_eq!((start_all(&mut requests), requests.waiting.len()), (DEPTH, 3));
        (0..PLACES).for_each(|_| requests.waiting.push_front(request(1)));
        assert_eq!((start_all(&mut requests), requests.waiting.len()), (PLACES - DEPTH, DEPTH + 3));
        // A place of a single page is not one for another request.
        requests.waiting.retain(|request| !request.goes_first);
        let single = requests.under_way.iter_mut().find(|place| place.as_ref().unwrap().goes_first);
        *single.unwrap() = None;
        assert_eq!(start_all(&mut requests), 0);
        requests.under_way[0] = None;
        assert_eq!((start_all(&mut requests), requests.waiting.len()), (1, 2));
    }
}
