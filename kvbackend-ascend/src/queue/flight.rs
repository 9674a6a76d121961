//! Holds of enqueued work, in the order of the work.

use std::collections::VecDeque;
use std::sync::Arc;

use kvcore::Result;

use super::event::AclEvent;
use super::held::Used;
use crate::bindings::types as sys;
use crate::device::Npu;

/// Number of holds after which an event is recorded, so that they can be dropped when the event is done.
const BATCH: usize = 64;

/// Holds in the order of the work that uses them, cut into batches by events.
#[derive(Debug, Default)]
pub(crate) struct WorkInFlight {
    batches: VecDeque<(AclEvent, Vec<Used>)>,
    current: Vec<Used>,
    /// Events that may be recorded again.
    spare: Vec<AclEvent>,
}

impl WorkInFlight {
    /// Holds something until the work enqueued so far and next is done.
    pub(crate) fn hold(&mut self, used: Used) {
        let address = used.address();
        if !self.current.iter().any(|known| known.address() == address) {
            self.current.push(used);
        }
    }

    /// Cuts a batch if there are many holds, and drops the batches whose work is done. The device's context is current.
    pub(crate) fn tidy(&mut self, npu: &Arc<Npu>, stream: sys::aclrtStream) -> Result<()> {
        if self.current.len() >= BATCH {
            self.cut(npu, stream)?;
        }
        while let Some((event, _)) = self.batches.front() {
            if !event.is_done()? {
                break;
            }
            self.drop_oldest();
        }
        Ok(())
    }

    /// Cuts a batch. The device's context is current.
    pub(super) fn cut(&mut self, npu: &Arc<Npu>, stream: sys::aclrtStream) -> Result<()> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => AclEvent::create(npu, 0)?,
        };
        if let Err(error) = event.record(stream) {
            self.spare.push(event);
            return Err(error);
        }
        self.batches.push_back((event, std::mem::take(&mut self.current)));
        Ok(())
    }

    /// Waits for the oldest batches and drops them, until fewer than `most` are left.
    pub(super) fn wait_until(&mut self, most: usize) -> Result<()> {
        while self.batches.len() >= most
            && let Some((event, _)) = self.batches.front()
        {
            event.wait()?;
            self.drop_oldest();
        }
        Ok(())
    }

    fn drop_oldest(&mut self) {
        self.spare.extend(self.batches.pop_front().map(|(event, _)| event));
    }

    /// Drops all holds. The caller has waited for the stream, or the device is lost.
    pub(super) fn clear(&mut self) {
        self.spare.extend(self.batches.drain(..).map(|(event, _)| event));
        self.current.clear();
    }
}
