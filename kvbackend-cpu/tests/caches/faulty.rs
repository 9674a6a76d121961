//! Tests the state of caches after a stream has refused an operation.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    Backend, BlockPool, Checked, Counters, Error, Event, PagedKvCache, PromptKeys, Result, SequenceStart,
    Storage, Stream, TensorView,
};
use rstest::rstest;

use crate::common::Memory;
use crate::sharing::{contents, root, write};

/// A stream that refuses one kind of operation and runs all others.
#[derive(Debug)]
pub(crate) struct Faulty {
    stream: Arc<dyn Stream>,
    refused: &'static str,
    /// Number of operations that were not refused.
    pub(crate) launched: AtomicUsize,
}

impl Faulty {
    pub(crate) fn new(m: &Memory, refused: &'static str) -> Self {
        Self { stream: Arc::clone(&m.stream), refused, launched: AtomicUsize::new(0) }
    }

    fn check(&self, operation: &str) -> Result<()> {
        if operation == self.refused { Err(refusal()) } else { Ok(()) }
    }
}

pub(crate) fn refusal() -> Error {
    Error::Unsupported { backend: "faulty", what: "this".to_owned() }
}

impl Stream for Faulty {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.check(operation.operation().name())?;
        self.launched.fetch_add(1, Ordering::Relaxed);
        self.stream.launch(operation)
    }
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.stream.owns(storage)
    }
    fn counters(&self) -> &Counters {
        self.stream.counters()
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        self.check("record")?;
        self.stream.record()
    }
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        self.check("wait_for")?;
        self.stream.wait_for(event)
    }
    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        self.stream.write(dst, src)
    }
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        self.stream.read(src, dst)
    }
}

fn cache(m: &Memory, blocks: u32) -> PagedKvCache {
    PagedKvCache::new(m.arena(blocks as usize, 4), BlockPool::new(0..blocks).unwrap()).unwrap()
}

#[rstest]
fn a_refused_swap_gives_the_sequence_back(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 8);
    let (host, pool) = (m.arena(5, 4), BlockPool::new(0..5).unwrap());
    let id = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, id, 10, 3.0);
    let before = contents(&m, &cache, id);
    for operation in ["swap_blocks", "record"] {
        let refused = cache.swap_out(id, &Faulty::new(&m, operation), &host, &pool);
        assert_eq!(refused.unwrap_err(), refusal(), "{operation}");
        assert_eq!((contents(&m, &cache, id), pool.counts().free), (before.clone(), 5));
    }
    let out = cache.swap_out(id, m.stream.as_ref(), &host, &pool).unwrap();
    for operation in ["swap_blocks", "wait_for"] {
        let refused = cache.swap_in(&out, &Faulty::new(&m, operation));
        assert_eq!(refused, Err(refusal()), "{operation}");
        assert_eq!((cache.pool().counts().free, pool.counts().mutable, cache.num_sequences()), (8, 3, 0));
    }
    let id = cache.swap_in(&out, m.stream.as_ref()).unwrap();
    drop(out);
    assert_eq!((contents(&m, &cache, id), pool.counts().free), (before, 5));
    cache.pool().check_invariants().unwrap();
}

#[rstest]
fn a_refused_copy_changes_nothing(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 8);
    let faulty = Faulty::new(&m, "copy_blocks");
    let (a, _) = cache.create_with_prefix(&PromptKeys::new(root(), &[1, 2, 3, 4, 5, 6, 7, 8], 4)).unwrap();
    write(&m, &mut cache, a, 8, 20.0);
    cache.commit(a, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let (b, cached) = cache.create_with_prefix(&PromptKeys::new(root(), &[1, 2, 3, 4, 5, 6, 70], 4)).unwrap();
    assert_eq!(cached, 4);
    write(&m, &mut cache, b, 2, 40.0);

    let c = cache.fork(b).unwrap();
    let (counts, blocks) = (cache.pool().counts(), cache.blocks(c).unwrap().clone());
    let before = contents(&m, &cache, c);
    assert_eq!(cache.copy_on_write(&[c], &faulty), Err(refusal()));
    assert_eq!((cache.pool().counts(), cache.blocks(c).unwrap()), (counts, &blocks));
    assert_eq!(contents(&m, &cache, c), before);
    assert!(matches!(cache.grow(c, 1), Err(Error::SharedBlock { .. })), "still shared");
    assert_eq!(cache.copy_on_write(&[c], m.stream.as_ref()), Ok(1));
    for id in [a, b, c] {
        cache.free(id).unwrap();
    }
    cache.pool().check_invariants().unwrap();
}

/// A swap-in waits for its swap-out, even on another stream.
#[rstest]
fn a_swap_in_on_another_stream_waits_for_the_swap_out(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 8);
    let (host, pool) = (m.arena(5, 4), BlockPool::new(0..5).unwrap());
    let id = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, id, 10, 3.0);
    let before = contents(&m, &cache, id);
    let out = cache.swap_out(id, m.stream.as_ref(), &host, &pool).unwrap();
    let other = m.backend.stream().unwrap();
    let id = cache.swap_in(&out, other.as_ref()).unwrap();
    other.synchronize().unwrap();
    assert_eq!(contents(&m, &cache, id), before);
}
