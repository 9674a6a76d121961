//! The ledger of a sleep store, which tracks the memory that sleeping pieces use and enforces the limit.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use crate::error::{Error, Result};

/// The memory usage of an [`ArenaSleep`](crate::ArenaSleep).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SleepUsage {
    /// The number of sleeping pieces.
    pub pieces: usize,
    /// The total size of these pieces on the device before they slept, in bytes.
    pub device_bytes: usize,
    /// The total host memory that these pieces use, in bytes.
    pub host_bytes: usize,
    /// The maximum host memory for pieces, in bytes.
    pub limit_bytes: usize,
}

impl SleepUsage {
    /// Returns the number of bytes by which the pieces are smaller than on the device, or 0 if they are not
    /// smaller.
    pub fn saved_bytes(&self) -> usize {
        self.device_bytes.saturating_sub(self.host_bytes)
    }
}

impl SleepUsage {
    fn check(&self, host: usize) -> Result<()> {
        let (limit, free) = (self.limit_bytes, self.limit_bytes - self.host_bytes);
        if host > free {
            return Err(Error::SleepFull { asked: host, free, limit });
        }
        Ok(())
    }
}

/// The ledger of a sleep store.
#[derive(Debug)]
pub(super) struct Ledger(Mutex<SleepUsage>);

/// A piece's entry in the ledger. Dropping it removes the piece from the ledger.
#[derive(Debug)]
pub(super) struct Charge {
    ledger: Arc<Ledger>,
    device: usize,
    host: usize,
}

impl Ledger {
    pub(super) fn new(limit_bytes: usize) -> Self {
        Self(Mutex::new(SleepUsage { limit_bytes, ..SleepUsage::default() }))
    }

    pub(super) fn usage(&self) -> SleepUsage {
        *self.0.lock()
    }

    /// Checks that `host` bytes are currently free.
    ///
    /// # Errors
    /// Returns [`Error::SleepFull`] if they are not.
    pub(super) fn has_room(&self, host: usize) -> Result<()> {
        self.0.lock().check(host)
    }

    /// Adds a piece that used `device` bytes on the device and uses `host` bytes on the host.
    ///
    /// # Errors
    /// Returns [`Error::SleepFull`] if the `host` bytes are not free.
    pub(super) fn charge(self: &Arc<Self>, device: usize, host: usize) -> Result<Charge> {
        let mut usage = self.0.lock();
        usage.check(host)?;
        usage.pieces += 1;
        usage.device_bytes += device;
        usage.host_bytes += host;
        Ok(Charge { ledger: Arc::clone(self), device, host })
    }
}

impl Charge {
    /// Returns the number of bytes that the piece uses on the host.
    pub(super) fn host_bytes(&self) -> usize {
        self.host
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut usage = self.ledger.0.lock();
        usage.pieces -= 1;
        usage.device_bytes -= self.device;
        usage.host_bytes -= self.host;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_stay_within_the_limit_and_are_released() {
        let ledger = Arc::new(Ledger::new(100));
        let first = ledger.charge(80, 60).unwrap();
        assert_eq!(ledger.charge(80, 41).unwrap_err(), Error::SleepFull { asked: 41, free: 40, limit: 100 });
        let second = ledger.charge(80, 40).unwrap();
        let full = SleepUsage { pieces: 2, device_bytes: 160, host_bytes: 100, limit_bytes: 100 };
        assert_eq!((ledger.usage(), full.saved_bytes(), first.host_bytes()), (full, 60, 60));
        drop((first, second));
        assert_eq!(ledger.usage(), SleepUsage { limit_bytes: 100, ..SleepUsage::default() });
    }
}
