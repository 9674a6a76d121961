//! The gate of a stream: either one capture has exclusive use of the stream, or calls outside of captures
//! share it.

use parking_lot::{Condvar, Mutex};

/// The gate of a stream. Captures are identified by IDs above 0.
#[derive(Debug, Default)]
pub struct CaptureGate {
    /// The ID of the current capture (0 if none), and the number of calls in progress.
    state: Mutex<(u64, usize)>,
    changed: Condvar,
}

/// The guard of a call in progress on a stream. Unless the call is part of a capture, no capture can begin on
/// the stream until the guard is dropped.
#[derive(Debug)]
pub struct CapturePass<'a>(Option<&'a CaptureGate>);

impl CapturePass<'_> {
    /// Returns the guard for a call that is part of a capture. This guard does not block anything.
    pub fn within_capture() -> Self {
        Self(None)
    }
}

impl Drop for CapturePass<'_> {
    fn drop(&mut self) {
        if let Some(gate) = self.0 {
            gate.state.lock().1 -= 1;
            gate.changed.notify_all();
        }
    }
}

impl CaptureGate {
    /// Waits until no capture uses the stream, and returns the guard for a new call.
    pub fn enter(&self) -> CapturePass<'_> {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |(capture, _)| *capture != 0);
        state.1 += 1;
        CapturePass(Some(self))
    }

    /// Waits until the stream has no calls and no capture, and then gives the capture with ID `number`
    /// exclusive use of it.
    pub fn close(&self, number: u64) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |(capture, calls)| *capture != 0 || *calls > 0);
        state.0 = number;
    }

    /// Ends the capture's exclusive use of the stream.
    pub fn open(&self) {
        self.state.lock().0 = 0;
        self.changed.notify_all();
    }

    /// Returns the ID of the capture that uses the stream, or 0 if there is none.
    pub fn capture(&self) -> u64 {
        self.state.lock().0
    }
}
