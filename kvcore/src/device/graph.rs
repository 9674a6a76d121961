//! Graphs, which capture the work of a step once and replay it with new lists.
//!
//! Each decode step enqueues the same kernels over the same memory. Only the lists differ: tokens, positions,
//! slots, and the segments with their lengths, offsets and blocks. A captured graph reads these lists from
//! memory that each replay overwrites, so one device call replaces all launches of a step.
//!
//! ```text
//!   GraphCache::run(stream, key, inputs, record) ─► output of record()
//!      first time    record()                      eager: kernels are loaded, memory is allocated
//!      second time   Stream::capture ─► Graph      record() enqueues nothing, and is replayed at once
//!      afterwards    Graph::replay(inputs)         no record(): overwrites the output of the capture
//! ```

use std::fmt;
use std::sync::Arc;

use crate::base::{Error, KvFormat, Result, SlotMapping, same};
use crate::device::{AttendWork, QueryRow, Stream, WriteSlots};

// Decision: docs/decisions/device.md#a-graph-identifies-its-input-lists
/// The lists of a step that change with each replay.
///
/// While a step is recorded, operations must use exactly these lists: a scatter must use the slots and
/// positions, an attend the work, and an embedding the tokens. Lists are recognised by their address, not by
/// their contents.
#[derive(Debug, Clone)]
pub struct StepInputs {
    /// The token of each row.
    pub tokens: Arc<[u32]>,
    /// The position of each row.
    pub positions: Arc<[i64]>,
    /// The slot that each row is written to.
    pub slots: WriteSlots,
    /// The attention work of the rows.
    pub work: Arc<AttendWork>,
}

impl StepInputs {
    /// Returns the inputs padded with rows up to a power of two, which lets batches of similar size share a
    /// graph. A padding row has token 0 and position 0. It is not written to the cache, it attends to
    /// nothing, and its output is left unchanged.
    #[must_use]
    pub fn padded(self) -> Self {
        let (rows, padded) = (self.positions.len(), self.positions.len().next_power_of_two());
        if rows == padded {
            return self;
        }
        let more = padded - rows;
        let nowhere = WriteSlots::unchecked(SlotMapping::from(vec![-1; more]));
        let mut at = self.work.rows().to_vec();
        at.resize(padded, QueryRow { logical: 0, position: 0 });
        let groups = Arc::clone(self.work.groups());
        Self {
            tokens: self.tokens.iter().copied().chain(vec![0; more]).collect(),
            positions: self.positions.iter().copied().chain(vec![0; more]).collect(),
            slots: WriteSlots::concat([&self.slots, &nowhere].into_iter()),
            work: Arc::new(AttendWork::with_groups(at, self.work.batch(), groups)),
        }
    }
}

/// A captured step.
///
/// - A graph keeps alive all memory that its work touches.
/// - A replay is enqueued on the stream of the capture, in order with other work on this stream.
/// - A replay checks its inputs like [`Operation::check`](crate::Operation::check) of each captured
///   operation. If a check fails, nothing is enqueued.
pub trait Graph: Send + Sync + fmt::Debug {
    /// Enqueues the captured work with new inputs.
    ///
    /// # Errors
    /// Returns the errors of the operations' checks, [`Error::Mismatch`] if the number of rows differs, and
    /// [`Error::GraphOutgrown`] if the graph does not have enough room for the inputs.
    fn replay(&self, inputs: &StepInputs) -> Result<()>;
}

/// The key under which a graph is cached. Steps with equal padded sizes and the same cache format share a
/// graph.
///
/// ```
/// use std::sync::Arc;
/// use kvcore::{AttendRows, AttendWork, BlockId, DType, GraphKey, QueryRow, Segment, StepInputs, WriteSlots};
///
/// let step = |position: usize| {
///     let own = Segment::new([BlockId(4)].into(), position + 1, 0, 0);
///     let row = QueryRow { logical: position, position: position as i64 };
///     StepInputs {
///         tokens: [7].into(),
///         positions: [row.position].into(),
///         slots: WriteSlots::unchecked(vec![64 + row.position]),
///         work: Arc::new(AttendWork::new([row], [AttendRows::new(0..1, [own])])),
///     }
/// };
/// assert_eq!(GraphKey::of(&step(9), DType::BF16), GraphKey::of(&step(10), DType::BF16));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphKey {
    /// Number of rows, padded to a power of two.
    pub rows: usize,
    /// Number of segments in all entries, including empty segments, padded to a power of two.
    pub chunks: usize,
    /// Total number of tokens in the segments of all entries, padded to a power of two of at least 256.
    pub tokens: usize,
    /// Storage format of the cache.
    pub format: KvFormat,
}

impl GraphKey {
    /// Returns the key of a step.
    pub fn of(inputs: &StepInputs, format: impl Into<KvFormat>) -> Self {
        let chunks: usize = inputs.work.batch().iter().map(|entry| entry.segments.len()).sum();
        Self {
            rows: inputs.positions.len().next_power_of_two(),
            chunks: chunks.next_power_of_two(),
            tokens: inputs.work.tokens().next_power_of_two().max(256),
            format: format.into(),
        }
    }
}

/// The mode in which [`GraphCache::run`] ran a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphRun {
    /// The step's operations were enqueued one by one.
    Eager,
    /// The step was captured as a new graph, which was then replayed once.
    Captured,
    /// An existing graph was replayed.
    Replayed,
}

/// The number of steps that a [`GraphCache`] ran in each mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct GraphCounts {
    /// Number of steps whose operations were enqueued one by one.
    pub eager: u64,
    /// Number of successful captures.
    pub captured: u64,
    /// Number of replays of an existing graph.
    pub replayed: u64,
    /// Number of captures that the backend rejected, or that ran out of memory. Such a step and later steps
    /// with the same key run eagerly.
    pub refused: u64,
}

/// The state of a key in the cache.
#[derive(Debug)]
enum Known<T> {
    Seen,
    /// A graph, and the value that the recorded function returned, which refers to the results of each
    /// replay.
    Captured(Arc<dyn Graph>, T),
    Refused,
}

// Decision: docs/decisions/device.md#a-step-is-captured-the-second-time-it-runs
/// The graphs of one stream, by key. The least recently used graph is dropped first.
///
/// All steps with the same key must enqueue the same operations over the same memory.
#[derive(Debug)]
pub struct GraphCache<T = ()> {
    most: usize,
    /// The keys seen so far and their states, with the most recently used key last.
    known: Vec<(GraphKey, Known<T>)>,
    counts: GraphCounts,
}

impl<T: Clone> GraphCache<T> {
    /// Creates a cache for at most `most` graphs. If `most` is 0, every step runs eagerly.
    pub fn new(most: usize) -> Self {
        Self { most, known: Vec::new(), counts: GraphCounts::default() }
    }

    /// Returns the maximum number of graphs.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> GraphCounts {
        self.counts
    }

    /// Drops all graphs. Must be called before steps start to enqueue different operations or to use
    /// different memory.
    pub fn clear(&mut self) {
        self.known.clear();
    }

    /// Runs a step, with a graph if possible. The inputs must be [padded](StepInputs::padded). `record` must
    /// enqueue the step's operations on `stream`, and is called at most once, or twice if a capture fails.
    /// Returns the mode and the output of `record`, which refers to the step's results.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the number of rows differs from the key's, and the errors of `record`,
    /// [`Stream::capture`] and [`Graph::replay`]. A step that cannot be captured is not an error.
    pub fn run(
        &mut self,
        stream: &dyn Stream,
        key: GraphKey,
        inputs: &StepInputs,
        record: &mut dyn FnMut() -> Result<T>,
    ) -> Result<(GraphRun, T)> {
        same("rows of a step, padded", key.rows, inputs.positions.len())?;
        let place = self.known.iter().position(|(known, _)| *known == key);
        let (seen, before) = match place.map(|place| self.known.remove(place).1) {
            Some(Known::Captured(graph, output)) => match graph.replay(inputs) {
                Err(Error::GraphOutgrown { .. }) => (true, Known::Seen),
                replayed => {
                    self.keep(key, Known::Captured(graph, output.clone()));
                    self.counts.replayed += u64::from(replayed.is_ok());
                    return replayed.map(|()| (GraphRun::Replayed, output));
                }
            },
            Some(other) => (matches!(other, Known::Seen), other),
            None => (false, Known::Seen),
        };
        self.keep(key, before);
        if seen && self.most > 0 {
            let mut output = None;
            let captured = stream.capture(inputs, &mut || {
                output = Some(record()?);
                Ok(())
            });
            match (captured, output) {
                (Ok(graph), Some(output)) => {
                    graph.replay(inputs)?;
                    self.counts.captured += 1;
                    self.known.pop();
                    self.keep(key, Known::Captured(graph, output.clone()));
                    return Ok((GraphRun::Captured, output));
                }
                // A step that cannot be captured, or whose graph does not fit in memory, runs eagerly, as it
                // did the first time.
                (Err(Error::Unsupported { .. } | Error::Allocation { .. }), _) | (Ok(_), None) => {
                    self.counts.refused += 1;
                    self.known.pop();
                    self.keep(key, Known::Refused);
                }
                (Err(other), _) => return Err(other),
            }
        }
        let output = record()?;
        self.counts.eager += 1;
        Ok((GraphRun::Eager, output))
    }

    fn keep(&mut self, key: GraphKey, known: Known<T>) {
        if self.known.len() >= self.most.max(1) {
            self.known.remove(0);
        }
        self.known.push((key, known));
    }
}
