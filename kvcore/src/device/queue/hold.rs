//! Holds, which keep memory and handles alive until enqueued work is done.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::Result;
use crate::device::Storage;

// Decision: docs/decisions/backend-cuda.md#enqueued-work-holds-its-memory-until-an-event
/// Number of holds per batch. After this many holds a mark is recorded, and the holds are dropped when the
/// mark is done.
const BATCH: usize = 64;

/// An object that enqueued work uses.
#[derive(Debug, Clone)]
pub enum Hold {
    /// Memory.
    Storage(Arc<dyn Storage>),
    /// Any other object, for example an event, a graph or a list's memory.
    Other(Arc<dyn Any + Send + Sync>),
}

impl Hold {
    /// Returns the address of the held object. Holds with equal addresses hold the same object.
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Storage(storage) => Arc::as_ptr(storage).cast::<u8>() as usize,
            Self::Other(other) => Arc::as_ptr(other).cast::<u8>() as usize,
        }
    }
}

/// A point in the order of a stream's work. A mark can be recorded again once it is done.
pub trait Mark: Sized {
    /// The stream type of the device.
    type Stream;

    /// Creates a mark that is not recorded yet.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn create(stream: &Self::Stream) -> Result<Self>;

    /// Records the mark after the work enqueued on a stream so far.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn record(&self, stream: &Self::Stream) -> Result<()>;

    /// Returns whether the work enqueued before the mark is done.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn is_done(&self) -> Result<bool>;

    /// Blocks the host until the work enqueued before the mark is done.
    ///
    /// # Errors
    /// Returns the errors of the device.
    fn wait(&self) -> Result<()>;
}

/// The holds of a stream, in the order of the stream's work, divided into batches by marks.
#[derive(Debug)]
pub struct InFlight<M> {
    batches: VecDeque<(M, Vec<Hold>)>,
    current: Vec<Hold>,
    /// Marks that may be recorded again.
    spare: Vec<M>,
}

impl<M> Default for InFlight<M> {
    fn default() -> Self {
        Self { batches: VecDeque::new(), current: Vec::new(), spare: Vec::new() }
    }
}

impl<M: Mark> InFlight<M> {
    /// Adds an object to the current batch, which keeps it alive until all work enqueued before the end of
    /// the batch is done.
    pub fn hold(&mut self, hold: Hold) {
        let address = hold.address();
        if !self.current.iter().any(|known| known.address() == address) {
            self.current.push(hold);
        }
    }

    /// Ends the current batch if it is full, and drops the batches whose work is done.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn tidy(&mut self, stream: &M::Stream) -> Result<()> {
        if self.current.len() >= BATCH {
            return self.cut(stream);
        }
        self.drop_done()
    }

    /// Ends the current batch, and drops the batches whose work is done.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn cut(&mut self, stream: &M::Stream) -> Result<()> {
        if !self.current.is_empty() {
            let mark = self.spare.pop().map_or_else(|| M::create(stream), Ok)?;
            if let Err(error) = mark.record(stream) {
                self.spare.push(mark);
                return Err(error);
            }
            self.batches.push_back((mark, std::mem::take(&mut self.current)));
        }
        self.drop_done()
    }

    fn drop_done(&mut self) -> Result<()> {
        while let Some((mark, _)) = self.batches.front()
            && mark.is_done()?
        {
            self.spare.extend(self.batches.pop_front().map(|(mark, _)| mark));
        }
        Ok(())
    }

    /// Waits for the oldest batches and drops them, until fewer than `most` batches are left.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn wait_until(&mut self, most: usize) -> Result<()> {
        while self.batches.len() >= most.max(1) {
            self.batches[0].0.wait()?;
            self.spare.extend(self.batches.pop_front().map(|(mark, _)| mark));
        }
        Ok(())
    }

    /// Drops all holds. The caller must have waited for the stream, unless the device is lost.
    pub fn clear(&mut self) {
        self.spare.extend(self.batches.drain(..).map(|(mark, _)| mark));
        self.current.clear();
    }
}
