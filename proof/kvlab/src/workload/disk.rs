//! Time to first token of documents on a disk: as fast as the disk is, and throttled, while it reads them and while it stores
//! them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvchunk::{ChunkedPrompt, ReuseCell};
use kvengine::{Engine, PromptTokens, Request};
use kvtier::io::{IoEnd, IoRequest, OnEnd};
use kvtier::{DiskIo, FileIo, Slab, SlabConfig};

use super::{Popularity, RagWorkload, TtftRow, TtftTarget};
use crate::error::{Error, Result};

/// The speeds of throttled disks, in bytes per second, with the names of the first prompt and of later ones.
const SPEEDS: [(f64, [&str; 2]); 4] = [
    (200e6, ["on a disk of 200 MB/s, first prompt", "on a disk of 200 MB/s, later prompts"]),
    (50e6, ["on a disk of 50 MB/s, first prompt", "on a disk of 50 MB/s, later prompts"]),
    (10e6, ["on a disk of 10 MB/s, first prompt", "on a disk of 10 MB/s, later prompts"]),
    (5e6, ["on a disk of 5 MB/s, first prompt", "on a disk of 5 MB/s, later prompts"]),
];

/// The speed of the disk that stores prompts while they are measured, and the name of the measurement.
const STORING: (f64, &str) = (5e6, "stored on a disk of 5 MB/s");

/// The number of prompts that this disk stores one after the other. It still writes the first one when the next one comes.
const STORED: usize = 2;

/// The targets for documents on a disk: against a full prefill with the disk as it is, and against computing the
/// documents without a disk if the disk is slow.
const TARGETS: [TtftTarget; 2] = [TtftTarget::TimesAsFast(5.0), TtftTarget::TimesAsLong(1.1)];

/// The number of measurements of each kind. Their median is reported.
const RUNS: usize = 5;

/// The longest time in which the disk must store the documents.
const PATIENCE: Duration = Duration::from_secs(120);

/// The seed of the prompt that is found. Those that are stored have the next ones.
const SEED: u64 = 0xd15c;

/// Measures a prompt of `chunks` documents of `length` tokens each, which are stored in `folder` and not in memory.
/// The folder gets a slab of `limit` bytes. Before each measurement, the memory forgets the documents, as after a
/// restart. One row is about prompts that are new, and that a slow disk stores.
///
/// # Errors
/// Returns the errors of the engine and of the slab.
pub fn disk_rows(
    engine: &mut Engine,
    folder: &Path,
    limit: u64,
    (chunks, length): (usize, usize),
    cell: ReuseCell,
) -> Result<Vec<TtftRow>> {
    let mut lab = DiskLab { engine, path: folder.join(Slab::FILE), limit, chunks, length, cell };
    let prompt = lab.prompt(SEED)?;
    let tokens = prompt.total_tokens();
    let full = median((0..RUNS).map(|_| lab.ttft(&prompt, true)).collect::<Result<_>>()?);
    let row = |what, took, limit, limit_took, target| TtftRow {
        what,
        tokens,
        took,
        limit,
        limit_took,
        target: Some(target),
    };
    lab.engine.open_disk(folder, lab.config())?;
    lab.ttft(&prompt, false)?;
    lab.flush()?;
    // The first load measures the disk.
    lab.ttft(&prompt, false)?;
    let found = median((0..RUNS).map(|_| lab.ttft(&prompt, false)).collect::<Result<_>>()?);
    let mut rows = vec![row("found on the disk", found, "full prefill", full, TARGETS[0])];
    let computed_in = "computed without a disk";
    for (speed, [first, later]) in SPEEDS {
        let mut times = [const { Vec::new() }; 3];
        // In turns, because the speed of a machine that others use changes with time.
        for _ in 0..RUNS {
            lab.engine.close_disk();
            times[0].push(lab.ttft(&prompt, false)?);
            lab.throttle(speed)?;
            times[1].push(lab.ttft(&prompt, false)?);
            times[2].push(lab.ttft(&prompt, false)?);
        }
        let [computed, first_took, later_took] = times.map(median);
        for (what, took) in [(first, first_took), (later, later_took)] {
            rows.push(row(what, took, computed_in, computed, TARGETS[1]));
        }
    }
    let (speed, what) = STORING;
    let (mut computed, mut stored) = (Vec::new(), Vec::new());
    let mut seeds = SEED + 1..;
    for _ in 0..RUNS {
        lab.engine.close_disk();
        let prompts: Vec<_> =
            seeds.by_ref().take(STORED).map(|seed| lab.prompt(seed)).collect::<Result<_>>()?;
        for prompt in &prompts {
            computed.push(lab.ttft(prompt, false)?);
        }
        let is_slow = lab.throttle(speed)?;
        let before = lab.stores();
        for prompt in &prompts {
            stored.push(lab.ttft(prompt, false)?);
        }
        // What was measured is over.
        is_slow.store(false, Ordering::Relaxed);
        lab.flush()?;
        if lab.stores() == before {
            return Err(Error::SlowDisk);
        }
    }
    lab.engine.close_disk();
    rows.push(row(what, median(stored), computed_in, median(computed), TARGETS[1]));
    Ok(rows)
}

/// Returns the median of a few times.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// An engine whose disk changes its speed, and the shape of its prompts.
struct DiskLab<'a> {
    engine: &'a mut Engine,
    path: PathBuf,
    limit: u64,
    chunks: usize,
    length: usize,
    cell: ReuseCell,
}

impl DiskLab<'_> {
    fn config(&self) -> SlabConfig {
        SlabConfig { limit: self.limit, ..SlabConfig::default() }
    }

    /// Returns a prompt that has nothing in common with those of other seeds.
    fn prompt(&self, seed: u64) -> Result<ChunkedPrompt> {
        let workload = RagWorkload {
            requests: 1,
            document_tokens: self.length,
            per_request: self.chunks,
            decoys: self.cell.mode.num_decoys(),
            system_tokens: 64,
            popularity: Popularity::Repetition(0.0),
            seed,
            ..RagWorkload::default()
        };
        Ok(workload.prompts(self.engine.model().config().vocab_size)?.remove(0))
    }

    /// Returns the time to first token of a prompt that the memory does not have.
    fn ttft(&mut self, prompt: &ChunkedPrompt, full: bool) -> Result<Duration> {
        if let Some(cache) = self.engine.chunks() {
            cache.clear();
        }
        if let Some(cache) = self.engine.cache().as_paged() {
            cache.pool().clear_cached();
        }
        let prompt = PromptTokens::Chunked(prompt.clone());
        let mut request = Request { max_new_tokens: 1, cell: self.cell, ..Request::new(prompt) };
        (request.full_attention, request.reuse) = (full, !full);
        Ok(self.engine.generate(&request, &mut ())?.ttft)
    }

    /// Opens the slab on a disk of this speed. The disk is slow until the value is false.
    fn throttle(&mut self, bytes_per_second: f64) -> Result<Arc<AtomicBool>> {
        let path = &self.path;
        let file = FileIo::open(path, None).map_err(|source| Error::Disk { path: path.clone(), source })?;
        let disk = Throttled::new(file, bytes_per_second);
        let is_slow = Arc::clone(&disk.is_slow);
        let config = self.config();
        self.engine.use_disk(|scope| Slab::over(Box::new(disk), path, scope, config, None))?;
        Ok(is_slow)
    }

    /// Waits until the disk has everything.
    fn flush(&self) -> Result<()> {
        let is_over = self.engine.disk().is_none_or(|disk| disk.flush(PATIENCE));
        if is_over { Ok(()) } else { Err(Error::SlowDisk) }
    }

    /// Returns a number that changes with each record that the disk stores.
    fn stores(&self) -> u64 {
        let usage = self.engine.disk().map(Slab::usage);
        usage.map_or(0, |usage| usage.records as u64 + usage.evicted)
    }
}

/// A disk that is as slow as a limit says.
#[derive(Debug)]
struct Throttled {
    file: Arc<FileIo>,
    /// `None` once this value is dropped.
    asked: Option<Sender<(Vec<IoRequest>, OnEnd)>>,
    is_slow: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Throttled {
    fn new(file: FileIo, bytes_per_second: f64) -> Self {
        let (file, is_slow) = (Arc::new(file), Arc::new(AtomicBool::new(true)));
        let (asked, requests) = channel::<(Vec<IoRequest>, OnEnd)>();
        let (through, slow) = (Arc::clone(&file), Arc::clone(&is_slow));
        let thread = std::thread::spawn(move || {
            let mut free = Instant::now();
            for (requests, on_end) in requests {
                for (index, request) in requests.into_iter().enumerate() {
                    if slow.load(Ordering::Relaxed) {
                        let seconds = request.pages.bytes().len() as f64 / bytes_per_second;
                        free = free.max(Instant::now()) + Duration::from_secs_f64(seconds);
                        std::thread::sleep(free.saturating_duration_since(Instant::now()));
                    }
                    let on_end = Arc::clone(&on_end);
                    let ended = move |end| on_end(IoEnd { index, ..end });
                    through.start(vec![request], Arc::new(ended));
                }
            }
        });
        Self { file, asked: Some(asked), is_slow, thread: Some(thread) }
    }
}

impl DiskIo for Throttled {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        if let Some(asked) = &self.asked {
            // The thread lives as long as this value.
            drop(asked.send((requests, on_end)));
        }
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.file.resize(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}

impl Drop for Throttled {
    fn drop(&mut self) {
        self.asked = None;
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            // A panicked thread has nothing left to wait for.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use kvtier::io::{Direction, Pages};

    use super::*;

    #[test]
    fn a_throttled_disk_is_as_slow_in_both_directions_until_it_is_not() {
        let path = std::env::temp_dir().join(format!("kvlab-throttled-{}", std::process::id()));
        let disk = Throttled::new(FileIo::open(&path, None).unwrap(), 10e6);
        disk.resize(1 << 20).unwrap();
        let took = |direction| {
            let (ended, ends) = channel();
            let request = |index: u64| {
                let mut pages = Pages::new(64);
                pages.bytes_mut().fill(index as u8);
                IoRequest { direction, offset: index << 18, pages }
            };
            let began = Instant::now();
            disk.start((0..4).map(request).collect(), Arc::new(move |end| ended.send(end).unwrap()));
            for _ in 0..4 {
                let end: IoEnd = ends.recv().unwrap();
                end.result.unwrap();
                assert!(end.pages.bytes().iter().all(|&byte| usize::from(byte) == end.index));
            }
            began.elapsed()
        };
        let slow = Duration::from_millis(104);
        assert!(took(Direction::Write) >= slow && took(Direction::Read) >= slow);
        disk.is_slow.store(false, Ordering::Relaxed);
        // A disk of the same speed would take five seconds for this.
        let began = Instant::now();
        for _ in 0..50 {
            took(Direction::Write);
        }
        assert!(began.elapsed() < Duration::from_secs(4));
        drop(disk);
        std::fs::remove_file(path).unwrap();
    }
}
