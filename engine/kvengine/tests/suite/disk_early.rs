//! Records are written to blocks while others are still being read, and nothing stays held if the request ends before.

use kvchunk::{ChunkedPrompt, LoadRule};
use kvengine::{Answer, Engine, PromptTokens, Request};
use rstest::rstest;

use crate::crowd::Read;
use crate::disk_waits::{Held, PATIENCE, request, saved, started};

/// The number of reads of a small record: its header and its payload.
const READS: usize = 2;

fn written(engine: &Engine) -> u64 {
    engine.backend().counters().host_write_bytes
}

/// Submits a request while the disk hangs, and starts its loads.
fn begun(engine: &mut Engine, held: &Held, request: &Request) -> Answer {
    held.hang();
    let answer = engine.submit(request.clone()).unwrap();
    engine.step().unwrap();
    assert!(held.len() > READS, "several records are read");
    answer
}

/// Answers the reads record by record, except the last one. Returns how often blocks were written in the meantime.
fn answer_all_but_one(engine: &mut Engine, held: &Held, folder: &std::path::Path) -> usize {
    let mut times = 0;
    while held.len() > READS {
        let before = written(engine);
        held.answer(READS, folder);
        engine.step().unwrap();
        times += usize::from(written(engine) > before);
    }
    times
}

/// Saves an ordinary prompt or one with documents. Returns the folder, the request, and the tokens of the answer.
fn saved_request(chunked: bool) -> (tempfile::TempDir, Request, Vec<u32>) {
    if chunked {
        let (folder, prompt, answer) = saved();
        return (folder, request(PromptTokens::Chunked(prompt)), answer.tokens);
    }
    let folder = tempfile::tempdir().unwrap();
    let request = request(PromptTokens::Plain((0..30).map(|i| 3 + i * 7 % 40).collect()));
    let (mut engine, _) = started(folder.path(), LoadRule::Always(PATIENCE));
    let answer = engine.generate(&request, &mut ()).unwrap();
    (folder, request, answer.tokens)
}

#[rstest]
fn blocks_are_filled_while_the_disk_reads(#[values(false, true)] chunked: bool) {
    let (folder, request, expected) = saved_request(chunked);
    let (mut engine, held) = started(folder.path(), LoadRule::Always(PATIENCE));
    let mut answer = begun(&mut engine, &held, &request);
    let mut read = Read::new(&request);
    let loads = held.len() / READS;
    let times = answer_all_but_one(&mut engine, &held, folder.path());
    assert!(times > 2, "blocks were written {times} times before the last record arrived");
    read.take(&mut answer);
    assert!(read.ends[0].is_none() && read.error.is_none());
    let before = written(&engine);
    while read.ends[0].is_none() {
        held.answer(READS, folder.path());
        engine.step().unwrap();
        read.take(&mut answer);
        assert!(read.error.is_none(), "{:?}", read.error);
    }
    let end = read.ends[0].as_ref().unwrap();
    assert_eq!(end.tokens, expected);
    assert!(end.chunks.iter().all(|chunk| chunk.hit && chunk.missed.is_none()), "{:?}", end.chunks);
    assert!(written(&engine) > before, "the last record is used, too");
    let usage = engine.disk().unwrap().usage();
    assert_eq!((usage.hits, usage.misses), (loads as u64, 0), "{usage:?}");
    if chunked {
        let counts = engine.chunks().unwrap().metrics();
        let pieces = end.chunks.len() as u64;
        let counted = (counts.lookup_count, counts.miss_count, counts.fetched, counts.hit_count);
        assert_eq!(counted, (pieces, pieces, pieces, 0), "each piece is looked up once: {counts:?}");
    }
    engine.check_invariants().unwrap();
}

#[rstest]
fn a_request_that_ends_before_the_last_record_arrives_holds_nothing(#[values(false, true)] chunked: bool) {
    let (folder, request, expected) = saved_request(chunked);
    let (mut engine, held) = started(folder.path(), LoadRule::Always(PATIENCE));
    let answer = begun(&mut engine, &held, &request);
    assert!(answer_all_but_one(&mut engine, &held, folder.path()) > 2);
    drop(answer);
    assert!(engine.step().unwrap().is_idle());
    engine.check_invariants().unwrap();
    let report = engine.report();
    for pool in [report.main, report.chunks].into_iter().flatten() {
        assert_eq!((pool.mutable, pool.shared), (0, 0), "{pool:?}");
    }
    // What was written is found, and the rest is loaded.
    held.fail();
    let again = engine.generate(&request, &mut ()).unwrap();
    assert_eq!(again.tokens, expected);
    assert!(again.chunks.iter().filter(|chunk| chunk.hit).count() + 1 >= again.chunks.len());
    engine.check_invariants().unwrap();
}

/// The other request may not reuse anything, so it does not wait for the disk.
#[test]
fn a_request_that_uses_no_disk_is_answered_while_blocks_are_filled() {
    let (folder, prompt, expected) = saved();
    let (mut engine, held) = started(folder.path(), LoadRule::Always(PATIENCE));
    let first = request(PromptTokens::Chunked(prompt.clone()));
    let mut answer = begun(&mut engine, &held, &first);
    let mut read = Read::new(&first);
    let alone = ChunkedPrompt::new(prompt.system().to_vec(), prompt.chunks()[..1].to_vec(), vec![4]).unwrap();
    let second = Request { reuse: false, ..request(PromptTokens::Chunked(alone)) };
    let mut other = engine.submit(second.clone()).unwrap();
    let mut other_read = Read::new(&second);
    while other_read.ends[0].is_none() {
        engine.step().unwrap();
        other_read.take(&mut other);
    }
    while read.ends[0].is_none() {
        held.answer(1, folder.path());
        engine.step().unwrap();
        read.take(&mut answer);
        assert!(read.error.is_none(), "{:?}", read.error);
    }
    assert_eq!(read.ends[0].as_ref().unwrap().tokens, expected.tokens);
    engine.check_invariants().unwrap();
}
