//! A disk that answers late or never: no step waits for it, and every request ends.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ChunkedPrompt, LoadRule, MissReason};
use kvcore::DType;
use kvengine::{Engine, Generation, PromptTokens, Request};
use kvtier::io::{Direction, IoRequest, OnEnd};
use kvtier::{DiskIo, FileIo, Slab, SlabConfig};
use parking_lot::Mutex;

use crate::asking::{ask_three, engine};
use crate::common::Golden;
use crate::crowd::Read;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A file that can stop answering reads or writes.
#[derive(Debug)]
struct SlowDisk {
    file: FileIo,
    held: Held,
}

/// The requests of one direction that the disk has not answered, while it hangs.
#[derive(Clone, Default)]
pub(crate) struct Held(Arc<Mutex<Option<HeldRequests>>>);

/// The direction of the requests that hang, and those that were started.
type HeldRequests = (Direction, Vec<HeldRequest>);

/// A request that the disk has not answered, with its index in its call.
type HeldRequest = (IoRequest, OnEnd, usize);

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Held")
    }
}

impl DiskIo for SlowDisk {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        let mut held = self.held.0.lock();
        if let Some((_, held)) = held.as_mut().filter(|(direction, _)| *direction == requests[0].direction) {
            let each = requests.into_iter().enumerate();
            held.extend(each.map(|(index, request)| (request, Arc::clone(&on_end), index)));
            return;
        }
        drop(held);
        self.file.start(requests, on_end);
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

impl Held {
    /// Stops answering reads.
    pub(crate) fn hang(&self) {
        self.hang_in(Direction::Read);
    }

    fn hang_in(&self, direction: Direction) {
        *self.0.lock() = Some((direction, Vec::new()));
    }

    /// Answers the requests that hang with an error, and lets later ones through.
    pub(crate) fn fail(&self) {
        for (request, on_end, index) in self.0.lock().take().map(|(_, held)| held).unwrap_or_default() {
            let IoRequest { pages, .. } = request;
            on_end(kvtier::io::IoEnd { index, pages, result: Err(io::Error::other("broken")) });
        }
    }

    /// Answers the first reads that hang from the disk in `folder`, up to a number of them.
    pub(crate) fn answer(&self, most: usize, folder: &Path) {
        let reads: Vec<HeldRequest> = match self.0.lock().as_mut() {
            Some((_, held)) => held.drain(..most.min(held.len())).collect(),
            None => return,
        };
        let file = std::fs::File::open(folder.join(Slab::FILE)).unwrap();
        for (IoRequest { offset, mut pages, .. }, on_end, index) in reads {
            file.read_exact_at(pages.bytes_mut(), offset).unwrap();
            on_end(kvtier::io::IoEnd { index, pages, result: Ok(()) });
        }
    }

    /// Returns the number of requests that hang.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().as_ref().map_or(0, |(_, held)| held.len())
    }
}

/// Starts an engine over a disk in `folder`, and returns it with the switch of the disk.
pub(crate) fn started(folder: &Path, rule: LoadRule) -> (Engine, Held) {
    started_within(folder, rule, SlabConfig::default().write_deadline)
}

/// Starts an engine whose disk is given up if a write takes longer than `write_deadline`.
fn started_within(folder: &Path, rule: LoadRule, write_deadline: Duration) -> (Engine, Held) {
    let mut engine = engine("llama", DType::F32.into());
    let path = folder.join(Slab::FILE);
    let held = Held::default();
    let disk = SlowDisk { file: FileIo::open(&path, None).unwrap(), held: held.clone() };
    let config = SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, write_deadline, ..SlabConfig::default() };
    engine.use_disk(|scope| Slab::over(Box::new(disk), &path, scope, config, None)).unwrap();
    engine.load_from_disk(rule);
    (engine, held)
}

/// Saves a prompt, and returns the folder and the answer.
pub(crate) fn saved() -> (tempfile::TempDir, ChunkedPrompt, Generation) {
    let (folder, prompt) = (tempfile::tempdir().unwrap(), Golden::load("llama").prompt);
    let (mut engine, _) = started(folder.path(), LoadRule::Always(PATIENCE));
    let answer = ask_three(&mut engine, &prompt, kvchunk::ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    (folder, prompt, answer)
}

pub(crate) fn request(prompt: impl Into<PromptTokens>) -> Request {
    Request {
        max_new_tokens: 3,
        cell: kvchunk::ReuseCell::SEQUENTIAL_WITH_SYSTEM,
        ..Request::new(prompt.into())
    }
}

fn plain() -> Request {
    request(PromptTokens::Plain((3..20).collect()))
}

#[test]
fn other_requests_are_answered_while_a_disk_hangs() {
    let (folder, prompt, expected) = saved();
    let (mut engine, held) = started(folder.path(), LoadRule::Always(PATIENCE));
    held.hang();
    let chunked = request(PromptTokens::Chunked(prompt));
    let mut late = engine.submit(chunked.clone()).unwrap();
    let mut other = engine.submit(plain()).unwrap();
    let (mut late_read, mut other_read) = (Read::new(&chunked), Read::new(&plain()));
    while other_read.ends[0].is_none() {
        let step = engine.step().unwrap();
        other_read.take(&mut other);
        late_read.take(&mut late);
        assert!(other_read.error.is_none() && late_read.ends[0].is_none());
        assert!(step.tokens > 0, "a step that only waits");
    }
    assert!(held.len() > 0, "the disk still hangs");
    held.fail();
    while late_read.ends[0].is_none() {
        engine.step().unwrap();
        late_read.take(&mut late);
        assert!(late_read.error.is_none(), "{:?}", late_read.error);
    }
    let late = late_read.ends[0].as_ref().unwrap();
    assert_eq!(late.tokens, expected.tokens);
    assert!(late.chunks.iter().all(|chunk| !chunk.hit && chunk.missed == Some(MissReason::Failed)));
    engine.check_invariants().unwrap();
}

#[test]
fn requests_are_answered_while_writes_hang_and_their_results_are_dropped() {
    let (_, prompt, expected) = saved();
    let folder = tempfile::tempdir().unwrap();
    let (mut engine, held) =
        started_within(folder.path(), LoadRule::Always(PATIENCE), Duration::from_millis(300));
    held.hang_in(Direction::Write);
    let asked = request(PromptTokens::Chunked(prompt));
    let first = engine.generate(&asked, &mut ()).unwrap();
    assert_eq!(first.tokens, expected.tokens);
    let plain = engine.generate(&plain(), &mut ()).unwrap();
    // A flush ends when the writes are given up.
    assert!(engine.disk().unwrap().flush(PATIENCE) && held.len() > 0);
    let usage = engine.disk().unwrap().usage();
    assert!(usage.stores_dropped > 3 && usage.write_deadline_exceeded > 0 && usage.records == 0, "{usage:?}");
    // What is in memory is found as before.
    let again = engine.generate(&asked, &mut ()).unwrap();
    assert!(again.tokens == expected.tokens && again.chunks.iter().all(|chunk| chunk.hit));
    engine.check_invariants().unwrap();
    // Closing does not wait for the disk either.
    engine.close_disk();
    assert!(held.len() > 0);
    assert_eq!(engine.generate(&self::plain(), &mut ()).unwrap().tokens, plain.tokens);
    held.fail();
}

#[test]
fn a_cancelled_request_leaves_nothing_while_a_disk_hangs() {
    let (folder, prompt, _) = saved();
    let (mut engine, held) = started(folder.path(), LoadRule::Always(PATIENCE));
    held.hang();
    let answer = engine.submit(request(PromptTokens::Chunked(prompt.clone()))).unwrap();
    engine.step().unwrap();
    assert!(held.len() > 0);
    drop(answer);
    assert!(engine.step().unwrap().is_idle());
    engine.check_invariants().unwrap();
    held.fail();
    // The records were being read when the disk failed, so they are gone, and the prompt is computed.
    let again = engine.generate(&request(PromptTokens::Chunked(prompt)), &mut ()).unwrap();
    assert!(again.chunks.iter().all(|chunk| !chunk.hit));
}

#[test]
fn a_request_stops_waiting_when_computing_would_have_been_faster() {
    let (folder, prompt, expected) = saved();
    let (mut engine, held) = started(folder.path(), LoadRule::IfFaster);
    held.hang();
    // The disk never answers, and the model is tiny.
    let answer = engine.generate(&request(PromptTokens::Chunked(prompt)), &mut ()).unwrap();
    assert_eq!(answer.tokens, expected.tokens);
    assert!(
        answer.chunks.iter().all(|chunk| chunk.missed == Some(MissReason::Deadline)),
        "{:?}",
        answer.chunks
    );
    let usage = engine.disk().unwrap().usage();
    assert!(usage.deadline_exceeded >= 3 && usage.hits == 0, "{usage:?}");
    assert!(held.len() > 0);
    held.fail();
}

#[test]
fn requests_for_the_same_records_load_them_once() {
    let (folder, prompt, expected) = saved();
    let (mut engine, _) = started(folder.path(), LoadRule::Always(PATIENCE));
    let records = engine.disk().unwrap().usage().records as u64;
    let asked = request(PromptTokens::Chunked(prompt));
    let mut answers: Vec<_> = (0..6).map(|_| engine.submit(asked.clone()).unwrap()).collect();
    let mut reads: Vec<_> = (0..6).map(|_| Read::new(&asked)).collect();
    while reads.iter().any(|read| read.ends[0].is_none()) {
        engine.step().unwrap();
        answers.iter_mut().zip(&mut reads).for_each(|(answer, read)| read.take(answer));
        assert!(reads.iter().all(|read| read.error.is_none()));
    }
    assert!(reads.iter().all(|read| read.ends[0].as_ref().unwrap().tokens == expected.tokens));
    let usage = engine.disk().unwrap().usage();
    assert_eq!((usage.hits, usage.misses), (records, 0), "{usage:?}");
}

#[test]
fn requests_behind_the_loads_of_others_wait_no_longer_than_their_own_may() {
    let (folder, prompt, expected) = saved();
    let limit = Duration::from_millis(300);
    let (mut engine, held) = started(folder.path(), LoadRule::Always(limit));
    let records = engine.disk().unwrap().usage().records;
    held.hang();
    // More than are tried again in a step, and a request of which nothing is on the disk behind them.
    let asked: Vec<Request> =
        (0..10).map(|_| request(PromptTokens::Chunked(prompt.clone()))).chain([plain()]).collect();
    let mut answers: Vec<_> = asked.iter().map(|asked| engine.submit(asked.clone()).unwrap()).collect();
    let mut reads: Vec<_> = asked.iter().map(Read::new).collect();
    let mut first = None;
    while reads.iter().any(|read| read.ends[0].is_none()) {
        engine.step().unwrap();
        answers.iter_mut().zip(&mut reads).for_each(|(answer, read)| read.take(answer));
        first = first.or_else(|| reads.iter().position(|read| read.ends[0].is_some()));
    }
    assert_eq!(first, Some(10), "what is not on the disk waits for nobody");
    assert!(reads[..10].iter().all(|read| read.ends[0].as_ref().unwrap().tokens == expected.tokens));
    // One at most begins its load between the end of the first one's and its own.
    let late = engine.disk().unwrap().usage().deadline_exceeded as usize;
    assert!(late <= 2 * records, "{late} loads of {records} records were late");
    held.fail();
    engine.check_invariants().unwrap();
}

#[test]
fn ordinary_prompts_are_found_after_a_restart_with_their_answers() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..30).map(|i| 3 + i * 7 % 40).collect();
    let ask = |prompt: &[u32]| {
        let (mut engine, _) = started(folder.path(), LoadRule::Always(PATIENCE));
        let request = Request { max_new_tokens: 8, ..request(PromptTokens::Plain(prompt.to_vec())) };
        let answer = engine.generate(&request, &mut ()).unwrap();
        engine.check_invariants().unwrap();
        (answer, engine.disk().unwrap().usage().hits)
    };
    let (first, hits) = ask(&prompt);
    assert_eq!((first.cached_tokens, hits), (0, 0));
    let (again, hits) = ask(&prompt);
    assert_eq!((again.cached_tokens, &again.tokens), (28, &first.tokens), "whole blocks of four tokens");
    assert!(hits >= 7);
    // The next turn of a conversation finds the answer before it, too.
    let next: Vec<u32> = prompt.iter().chain(&first.tokens).copied().chain([9, 11, 13]).collect();
    assert_eq!(ask(&next).0.cached_tokens, 36);
    // Another prompt with the same start finds the start.
    let other: Vec<u32> = prompt[..14].iter().copied().chain([5; 10]).collect();
    assert_eq!(ask(&other).0.cached_tokens, 12);
}

#[test]
fn the_reasons_of_misses_are_told() {
    let (folder, prompt, _) = saved();
    let chunks = prompt.chunks().to_vec();
    let missed = |engine: &mut Engine, prompt: &ChunkedPrompt| {
        let answer = engine.generate(&request(PromptTokens::Chunked(prompt.clone())), &mut ()).unwrap();
        answer.chunks.iter().map(|chunk| chunk.missed).collect::<Vec<_>>()
    };
    let (mut engine, _) = started(folder.path(), LoadRule::Always(PATIENCE));
    assert_eq!(missed(&mut engine, &prompt), vec![None; chunks.len()]);
    let other_system = ChunkedPrompt::new(vec![7, 8, 9, 10, 11], chunks.clone(), vec![4]).unwrap();
    assert_eq!(missed(&mut engine, &other_system), vec![Some(MissReason::OtherContext); chunks.len()]);
    let new = ChunkedPrompt::new(prompt.system().to_vec(), vec![vec![9; 9]], vec![4]).unwrap();
    assert_eq!(missed(&mut engine, &new), [Some(MissReason::New)]);
    drop(engine);
    let mut engine = crate::asking::engine("llama", DType::BF16.into());
    engine
        .open_disk(folder.path(), SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, ..SlabConfig::default() })
        .unwrap();
    assert_eq!(missed(&mut engine, &prompt), vec![Some(MissReason::OtherModel); chunks.len()]);
    drop(engine);
    // Other documents push the first ones out of memory and off the disk.
    let (mut engine, _) = started(folder.path(), LoadRule::Always(PATIENCE));
    missed(&mut engine, &prompt);
    let mut token = 1_u64;
    let mut document = || {
        let mut next = || {
            token = token * 1_103_515_245 % 2_147_483_647;
            3 + (token % 45) as u32
        };
        (0..20).map(|_| next()).collect::<Vec<_>>()
    };
    let full = |engine: &Engine| {
        let first = engine.chunks().unwrap().metrics();
        first.evictions > 20 && engine.disk().unwrap().usage().evicted > 200
    };
    while !full(&engine) {
        let documents = (0..8).map(|_| document()).collect();
        let other = ChunkedPrompt::new(prompt.system().to_vec(), documents, vec![4]).unwrap();
        assert!(missed(&mut engine, &other).iter().all(|reason| *reason == Some(MissReason::New)));
        assert!(engine.disk().unwrap().flush(PATIENCE));
    }
    assert_eq!(missed(&mut engine, &prompt), vec![Some(MissReason::Evicted); chunks.len()]);
}
