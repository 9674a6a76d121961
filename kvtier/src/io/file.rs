//! A file, and the choice of how its requests reach the kernel.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::pages::PagePool;
use super::threads::ThreadIo;
use super::{DiskIo, IoChoice, IoRequest, IoWay, OnEnd, Pages, Transport, place};

/// A file that bypasses the page cache where the file system allows it. [`DEPTH`](super::DEPTH) requests are
/// under way at once.
///
/// # Drop behaviour
/// Waits for the requests that have been started.
#[derive(Debug)]
pub struct FileIo {
    transport: Box<dyn Transport>,
    choice: IoChoice,
    file: Arc<File>,
    pool: Arc<PagePool>,
}

impl FileIo {
    /// Opens or creates a file for reading and writing. Uses the first of [`IoWay::ALL`] that works here, or
    /// `way` alone if it is given.
    ///
    /// # Errors
    /// Returns the system's error if the file cannot be opened, or the reason why `way` cannot be used here.
    pub fn open(path: &Path, way: Option<IoWay>) -> io::Result<Self> {
        Self::over(place::open(path)?, way)
    }

    /// Chooses a way of I/O for an open file.
    fn over(file: File, way: Option<IoWay>) -> io::Result<Self> {
        let file = Arc::new(file);
        let pool = PagePool::new();
        let mut refused = Vec::new();
        for tried in IoWay::ALL.into_iter().filter(|tried| way.is_none_or(|way| way == *tried)) {
            match transport(tried, &file, &pool) {
                Ok(transport) => {
                    let choice = IoChoice { way: tried, refused };
                    return Ok(Self { transport, choice, file, pool });
                }
                Err(error) => refused.push((tried, error.to_string())),
            }
        }
        let reasons: Vec<String> = refused.iter().map(|(way, reason)| format!("{way}: {reason}")).collect();
        Err(io::Error::other(format!(
            "this way of I/O cannot be used here ({}); leave the choice to kvtier, or choose another way",
            reasons.join("; ")
        )))
    }
}

/// Starts a way of I/O.
fn transport(way: IoWay, file: &Arc<File>, pool: &Arc<PagePool>) -> io::Result<Box<dyn Transport>> {
    match way {
        #[cfg(target_os = "linux")]
        IoWay::RegisteredUring | IoWay::Uring => {
            let registered = (way == IoWay::RegisteredUring).then_some(pool);
            Ok(Box::new(super::uring::UringIo::new(Arc::clone(file), registered)?))
        }
        #[cfg(not(target_os = "linux"))]
        IoWay::RegisteredUring | IoWay::Uring => {
            let _ = pool;
            Err(io::Error::new(io::ErrorKind::Unsupported, "only Linux has io_uring"))
        }
        IoWay::Threads => Ok(Box::new(ThreadIo::new(Arc::clone(file))?)),
    }
}

impl DiskIo for FileIo {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        self.transport.start(requests, on_end);
    }

    fn pages(&self, count: usize) -> Pages {
        self.pool.lend(count)
    }

    fn choice(&self) -> Option<&IoChoice> {
        Some(&self.choice)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        if bytes < self.size()? {
            self.file.set_len(bytes)?;
        }
        if bytes > 0 {
            place::reserve(&self.file, bytes)?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::io::{Direction, PAGE, RunFault, run};

    /// A file whose reads wait until a test writes to the other end of a pipe, in both ways that can read one.
    /// Nothing is left to test where the kernel refuses them.
    fn pipes() -> Vec<(FileIo, std::io::PipeWriter)> {
        let open = |way| {
            let (reader, writer) = std::io::pipe().unwrap();
            let file = FileIo::over(OwnedFd::from(reader).into(), Some(way));
            file.inspect_err(|reason| println!("SKIPPED {way}: {reason}")).ok().map(|file| (file, writer))
        };
        [IoWay::RegisteredUring, IoWay::Uring].into_iter().filter_map(open).collect()
    }

    fn read(file: &FileIo) -> IoRequest {
        IoRequest { direction: Direction::Read, offset: 0, pages: file.pages(3) }
    }

    /// Waits until all memory is back in the pool.
    fn wait_for_memory(file: &FileIo) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while file.pool.left() < usize::from(PagePool::PIECES) {
            assert!(Instant::now() < deadline, "memory is missing: {:?}", file.pool);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn memory_belongs_to_the_kernel_until_it_is_done() {
        for (file, mut writer) in pipes() {
            let request = read(&file);
            let address = request.pages.bytes().as_ptr();
            let late = run(&file, vec![request], Some(Instant::now() + Duration::from_millis(20)));
            assert!(matches!(late, Err(RunFault::Late)), "{late:?}");
            // The kernel may still write to this memory, so nobody else gets it.
            let others: Vec<Pages> = (0..2 * PagePool::PIECES).map(|_| file.pages(3)).collect();
            assert!(others.iter().all(|pages| pages.bytes().as_ptr() != address));
            assert_eq!(file.pool.left(), 0);
            drop(others);
            assert_eq!(file.pool.left(), usize::from(PagePool::PIECES) - 1);
            writer.write_all(&[7; 3 * PAGE]).unwrap();
            wait_for_memory(&file);
        }
    }

    #[test]
    fn a_request_goes_on_after_its_thread_and_in_pieces() {
        for (file, mut writer) in pipes() {
            let (sender, ended) = std::sync::mpsc::channel();
            let sender = parking_lot::Mutex::new(sender);
            std::thread::scope(|scope| {
                let start = || {
                    let on_end = move |end| sender.lock().send(end).unwrap();
                    file.start(vec![read(&file)], Arc::new(on_end));
                };
                scope.spawn(start);
            });
            for piece in 0..6 {
                std::thread::sleep(Duration::from_millis(2));
                writer.write_all(&[piece; PAGE / 2]).unwrap();
            }
            let end = ended.recv_timeout(Duration::from_secs(20)).unwrap();
            end.result.unwrap();
            let found = end.pages.bytes().chunks(PAGE / 2).zip(0..);
            assert!(found.into_iter().all(|(half, piece)| half.iter().all(|&byte| byte == piece)));
            drop(end.pages);
            wait_for_memory(&file);
            drop(writer);
            let end = run(&file, vec![read(&file)], None);
            assert!(
                matches!(end, Err(RunFault::Failed(error)) if error.kind() == io::ErrorKind::UnexpectedEof)
            );
        }
    }
}
