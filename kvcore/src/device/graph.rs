//! Graphs: a step's work, captured once and replayed with other lists.
//!
//! Each decode step enqueues the same kernels over the same memory. Only the lists differ: tokens, positions,
//! slots, and the segments with their lengths, offsets and blocks. A captured graph reads these lists from
//! memory that each replay overwrites: one call of the device replaces all launches of a step.
//!
//! ```text
//!   GraphCache::run(stream, key, inputs, record) ─► output of record()
//!      first time    record()                      eager: kernels are loaded, memory is taken
//!      second time   Stream::capture ─► Graph      record() enqueues nothing, and is replayed at once
//!      afterwards    Graph::replay(inputs)         no record(): overwrites the output of the capture
//! ```

use std::fmt;
use std::sync::Arc;

use crate::base::{Error, KvFormat, Result, SlotMapping, same};
use crate::device::{AttendWork, QueryRow, Stream, WriteSlots};

// Decision: docs/decisions/device.md#the-inputs-of-a-graph-are-lists-known-by-identity
/// The lists of a step that change from replay to replay.
///
/// While a step is recorded, operations must use these very lists: a scatter the slots and positions, an
/// attend the work, an embedding the tokens. Lists are recognised by identity, not by contents.
#[derive(Debug, Clone)]
pub struct StepInputs {
    /// Token of each row.
    pub tokens: Arc<[u32]>,
    /// Position of each row.
    pub positions: Arc<[i64]>,
    /// Slot that each row is written to.
    pub slots: WriteSlots,
    /// Attention work of the rows.
    pub work: Arc<AttendWork>,
}

impl StepInputs {
    /// Returns the inputs padded with rows up to a power of two, which lets batches of similar size share a
    /// graph. Padding is token 0 at position 0, is written nowhere, and attends to nothing: its output is
    /// left unchanged.
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
/// - A replay is enqueued on the stream of the capture, in order with the stream's other work.
/// - A replay checks its inputs as [`Operation::check`](crate::Operation::check) does for each captured
///   operation. If it refuses them, nothing is enqueued.
pub trait Graph: Send + Sync + fmt::Debug {
    /// Enqueues the captured work with other inputs.
    ///
    /// # Errors
    /// Returns the errors of the operations' checks, [`Error::Mismatch`] for another number of rows, and
    /// [`Error::GraphOutgrown`] if the inputs need more room than the graph has.
    fn replay(&self, inputs: &StepInputs) -> Result<()>;
}

/// The steps that one graph can serve: those of equal padded sizes over caches of one format.
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
    /// Rows, padded to a power of two.
    pub rows: usize,
    /// Segments of all entries, padded to a power of two. A chunk that is absent counts as one of length 0.
    pub chunks: usize,
    /// Cached tokens that the rows attend to, padded to a power of two of at least 256.
    pub tokens: usize,
    /// Format of the cache.
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

/// The way in which [`GraphCache::run`] ran a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GraphRun {
    /// Operation by operation.
    Eager,
    /// Captured, and the new graph replayed once.
    Captured,
    /// By replaying an existing graph.
    Replayed,
}

/// Numbers of runs of a [`GraphCache`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct GraphCounts {
    /// Runs operation by operation.
    pub eager: u64,
    /// Captures.
    pub captured: u64,
    /// Replays of an existing graph.
    pub replayed: u64,
    /// Captures that the backend refused, or that found no memory. Later steps with such a key run eagerly.
    pub refused: u64,
}

/// The state of a key in the cache.
#[derive(Debug)]
enum Known<T> {
    Seen,
    /// A graph, and the value that the recorded function returned: the place where each replay writes its
    /// results.
    Captured(Arc<dyn Graph>, T),
    Refused,
}

// Decision: docs/decisions/device.md#a-step-is-captured-when-it-comes-a-second-time
/// The graphs of one stream, by key. The least recently used graph is dropped first.
///
/// The caller guarantees that all steps under one key enqueue the same operations over the same memory.
#[derive(Debug)]
pub struct GraphCache<T = ()> {
    most: usize,
    /// The most recently used graph is last.
    known: Vec<(GraphKey, Known<T>)>,
    counts: GraphCounts,
}

impl<T: Clone> GraphCache<T> {
    /// Creates a cache of at most `most` graphs. With 0, every step runs eagerly.
    pub fn new(most: usize) -> Self {
        Self { most, known: Vec::new(), counts: GraphCounts::default() }
    }

    /// Returns the largest number of graphs.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Returns the numbers of runs so far.
    pub fn counts(&self) -> GraphCounts {
        self.counts
    }

    /// Forgets all graphs. Call this before steps enqueue other operations or use other memory.
    pub fn clear(&mut self) {
        self.known.clear();
    }

    /// Runs a step whose operations `record` enqueues on `stream`, by a graph if one fits. `record` runs at
    /// most once, or twice if a capture is refused. Returns its output: the place of the step's results.
    ///
    /// # Errors
    /// Returns the errors of `record` and of [`Graph::replay`]. A step that cannot be captured is no error.
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
                // A step that cannot be captured runs eagerly, as it did the first time. So does one whose
                // graph finds no memory.
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
