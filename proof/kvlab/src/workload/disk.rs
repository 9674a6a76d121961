//! Time to first token of documents on a disk: as fast as the disk is, and throttled.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvchunk::ReuseCell;
use kvengine::{Engine, PromptTokens, Request};
use kvtier::io::{Direction, IoRequest, OnEnd};
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

/// The targets for documents on a disk: against a full prefill with the disk as it is, and against computing the
/// documents without a disk if the disk is slow.
const TARGETS: [TtftTarget; 2] = [TtftTarget::TimesAsFast(5.0), TtftTarget::TimesAsLong(1.1)];

/// The number of measurements of each kind. Their median is reported.
const RUNS: usize = 5;

/// The longest time in which the disk must store the documents.
const PATIENCE: Duration = Duration::from_secs(120);

/// Measures a prompt of `chunks` documents of `length` tokens each, which are stored in `folder` and not in memory.
/// The folder gets a slab of `limit` bytes. Before each measurement, the memory forgets the documents, as after a
/// restart.
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
    let workload = RagWorkload {
        requests: 1,
        document_tokens: length,
        per_request: chunks,
        decoys: cell.mode.num_decoys(),
        system_tokens: 64,
        popularity: Popularity::Repetition(0.0),
        seed: 0xd15c,
        ..RagWorkload::default()
    };
    let prompt = workload.prompts(engine.model().config().vocab_size)?.remove(0);
    let tokens = prompt.total_tokens();
    let prompt = PromptTokens::Chunked(prompt);
    let ttft = |engine: &mut Engine, full: bool| -> Result<Duration> {
        if let Some(cache) = engine.chunks() {
            cache.clear();
        }
        if let Some(cache) = engine.cache().as_paged() {
            cache.pool().clear_cached();
        }
        let mut request = Request { max_new_tokens: 1, cell, ..Request::new(prompt.clone()) };
        (request.full_attention, request.reuse) = (full, !full);
        Ok(engine.generate(&request, &mut ())?.ttft)
    };
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let several = |engine: &mut Engine, full: bool| -> Result<Duration> {
        Ok(median((0..RUNS).map(|_| ttft(engine, full)).collect::<Result<_>>()?))
    };
    let full = several(engine, true)?;
    let row = |what, took, limit, limit_took, target| TtftRow {
        what,
        tokens,
        took,
        limit,
        limit_took,
        target: Some(target),
    };
    engine.open_disk(folder, SlabConfig { limit, ..SlabConfig::default() })?;
    ttft(engine, false)?;
    if engine.disk().is_some_and(|disk| !disk.flush(PATIENCE)) {
        return Err(Error::SlowDisk);
    }
    // The first load measures the disk.
    ttft(engine, false)?;
    let found = several(engine, false)?;
    let mut rows = vec![row("found on the disk", found, "full prefill", full, TARGETS[0])];
    let path = folder.join(Slab::FILE);
    for (speed, [first, later]) in SPEEDS {
        let mut times = [const { Vec::new() }; 3];
        // In turns, because the speed of a machine that others use changes with time.
        for _ in 0..RUNS {
            engine.close_disk();
            times[0].push(ttft(engine, false)?);
            let file =
                FileIo::open(&path, None).map_err(|source| Error::Disk { path: path.clone(), source })?;
            let disk = Box::new(Throttled::new(file, speed));
            let config = SlabConfig { limit, ..SlabConfig::default() };
            engine.use_disk(|scope| Slab::over(disk, &path, scope, config, None))?;
            times[1].push(ttft(engine, false)?);
            times[2].push(ttft(engine, false)?);
        }
        let [computed, first_took, later_took] = times.map(median);
        for (what, took) in [(first, first_took), (later, later_took)] {
            rows.push(row(what, took, "computed without a disk", computed, TARGETS[1]));
        }
    }
    engine.close_disk();
    Ok(rows)
}

/// A disk whose reads are as slow as a limit says.
#[derive(Debug)]
struct Throttled {
    file: Arc<FileIo>,
    /// `None` once this value is dropped.
    reads: Option<Sender<(Vec<IoRequest>, OnEnd)>>,
    thread: Option<JoinHandle<()>>,
}

impl Throttled {
    fn new(file: FileIo, bytes_per_second: f64) -> Self {
        let file = Arc::new(file);
        let (reads, asked) = channel::<(Vec<IoRequest>, OnEnd)>();
        let through = Arc::clone(&file);
        let thread = std::thread::spawn(move || {
            let mut free = Instant::now();
            for (requests, on_end) in asked {
                let mut requests: VecDeque<(usize, IoRequest)> = requests.into_iter().enumerate().collect();
                while let Some((index, request)) = requests.pop_front() {
                    let seconds = request.pages.bytes().len() as f64 / bytes_per_second;
                    free = free.max(Instant::now()) + Duration::from_secs_f64(seconds);
                    std::thread::sleep(free.saturating_duration_since(Instant::now()));
                    let on_end = Arc::clone(&on_end);
                    let ended = move |end| on_end(kvtier::io::IoEnd { index, ..end });
                    through.start(vec![request], Arc::new(ended));
                }
            }
        });
        Self { file, reads: Some(reads), thread: Some(thread) }
    }
}

impl DiskIo for Throttled {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        match &self.reads {
            Some(reads) if requests.iter().all(|request| request.direction == Direction::Read) => {
                // The thread lives as long as this value.
                drop(reads.send((requests, on_end)));
            }
            _ => self.file.start(requests, on_end),
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
        self.reads = None;
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            // A panicked thread has nothing left to wait for.
            let _ = thread.join();
        }
    }
}
