//! Holds of enqueued work: what lives until the work is done.

use std::collections::VecDeque;
use std::sync::Arc;

use kvcore::{Result, Storage};

use super::event::RawEvent;
use super::graph::CapturedWork;
use super::upload::Upload;
use crate::bindings::types as sys;
use crate::device::Device;

/// Number of handles after which an event is recorded, so that they can go when the event is done.
const BATCH: usize = 64;

/// What enqueued work uses.
#[derive(Debug, Clone)]
pub(crate) enum Held {
    Storage(Arc<dyn Storage>),
    Upload(Arc<Upload>),
    Event(Arc<RawEvent>),
    Graph(Arc<CapturedWork>),
}

impl Held {
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Storage(storage) => Arc::as_ptr(storage).cast::<u8>() as usize,
            Self::Upload(upload) => Arc::as_ptr(upload) as usize,
            Self::Event(event) => Arc::as_ptr(event) as usize,
            Self::Graph(graph) => Arc::as_ptr(graph) as usize,
        }
    }
}

/// Handles in the order of the work that uses them, cut into batches by events.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    batches: VecDeque<(RawEvent, Vec<Held>)>,
    current: Vec<Held>,
    /// Events that may be recorded again.
    spare: Vec<RawEvent>,
}

impl InFlight {
    /// Holds something until the work enqueued so far and next is done.
    pub(super) fn hold(&mut self, held: Held) {
        let address = held.address();
        if !self.current.iter().any(|known| known.address() == address) {
            self.current.push(held);
        }
    }

    /// Cuts a batch if there are many handles, and lets go of those whose work is done. The device's context is current.
    pub(super) fn tidy(&mut self, device: &Arc<Device>, stream: sys::aclrtStream) -> Result<()> {
        if self.current.len() >= BATCH {
            self.cut(device, stream)?;
        }
        while let Some((event, _)) = self.batches.front() {
            if !event.is_done()? {
                break;
            }
            self.spare.extend(self.batches.pop_front().map(|(event, _)| event));
        }
        Ok(())
    }

    /// Cuts a batch. The device's context is current.
    pub(super) fn cut(&mut self, device: &Arc<Device>, stream: sys::aclrtStream) -> Result<()> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => RawEvent::create(device)?,
        };
        if let Err(error) = event.record(stream) {
            self.spare.push(event);
            return Err(error);
        }
        self.batches.push_back((event, std::mem::take(&mut self.current)));
        Ok(())
    }

    /// Lets go of the oldest batches, and waits for them, until fewer than `most` are left.
    pub(super) fn wait_until(&mut self, most: usize) -> Result<()> {
        while self.batches.len() >= most
            && let Some((event, _)) = self.batches.front()
        {
            event.wait()?;
            self.spare.extend(self.batches.pop_front().map(|(event, _)| event));
        }
        Ok(())
    }

    /// Lets go of everything. The caller has waited for the stream, or the device is lost.
    pub(super) fn clear(&mut self) {
        self.spare.extend(self.batches.drain(..).map(|(event, _)| event));
        self.current.clear();
    }
}
