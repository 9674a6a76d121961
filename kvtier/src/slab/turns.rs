//! The turns of loads: they are read in the order of their calls, and only as many at once as keep the disk busy.
//! Loads that wait have no memory yet, so the memory of earlier ones is used again.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::load::PlacedLoad;
use crate::io::DEPTH;

/// Another load is started while fewer requests are under way. While one load is checked, the rest keep the disk busy.
const BUSY: usize = DEPTH + DEPTH / 4;

/// The loads that are being read, and those that wait for their turn.
#[derive(Default)]
pub(super) struct ReadTurns(Mutex<Turns>);

#[derive(Default)]
struct Turns {
    /// The number of requests of the loads that are being read.
    under_way: usize,
    waiting: VecDeque<PlacedLoad>,
    /// True while a thread starts a load. This thread looks for the next one, too.
    is_starting: bool,
}

impl ReadTurns {
    /// Adds a load, and starts the loads whose turn it is.
    pub(super) fn enter(&self, load: PlacedLoad) {
        self.0.lock().waiting.push_back(load);
        self.start();
    }

    /// Ends a load with this number of requests, and starts the loads whose turn it is.
    pub(super) fn leave(&self, requests: usize) {
        self.0.lock().under_way -= requests;
        self.start();
    }

    /// Starts loads. A load can end while it is started, so that a recursion would be as deep as the queue is long.
    fn start(&self) {
        loop {
            let mut turns = self.0.lock();
            if turns.is_starting || turns.under_way >= BUSY {
                return;
            }
            let Some(next) = turns.waiting.pop_front() else { return };
            turns.under_way += next.requests();
            turns.is_starting = true;
            drop(turns);
            next.read();
            self.0.lock().is_starting = false;
        }
    }
}
