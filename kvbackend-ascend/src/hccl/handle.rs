//! A rank's HCCL handle, and functions to join a group within a time limit.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use kvcore::{Error, Result};

use super::id::HcclId;
use super::library::{HcclLibrary, loaded};
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::NAME;

/// A rank's HCCL handle. Dropping this value destroys the handle.
pub(super) struct RankHandle {
    pub(super) raw: sys::HcclComm,
    npu: Arc<Npu>,
    loaded: &'static HcclLibrary,
}

// SAFETY: handles may be used from any thread on which the device's context is current. The communicator's
// lock ensures that only one thread at a time issues collectives.
unsafe impl Send for RankHandle {}
// SAFETY: the same condition as for `Send`; a query for failures changes nothing.
unsafe impl Sync for RankHandle {}

impl Drop for RankHandle {
    fn drop(&mut self) {
        if let Ok(_current) = self.npu.bind_lost() {
            // SAFETY: HCCL created the handle, which is destroyed only here, and none of its collectives is
            // in progress.
            unsafe { self.loaded.hccl.HcclCommDestroy(self.raw) };
        }
    }
}

impl RankHandle {
    /// Checks that HCCL has reported no failed collective of this rank.
    ///
    /// # Errors
    /// Returns [`Error::Device`] with the failure that HCCL reported.
    pub(super) fn check(&self) -> Result<()> {
        let _current = self.npu.bind()?;
        let mut failed = sys::HCCL_SUCCESS;
        // SAFETY: the handle is alive, the context of its device is current, and `failed` is valid for
        // writes. HCCL allows this query on any thread while collectives run.
        let code = unsafe { self.loaded.hccl.HcclGetCommAsyncError(self.raw, &raw mut failed) };
        self.loaded.check("the state of a group", code)?;
        self.loaded.check("the group has failed", failed)
    }
}

/// Joins a group as one rank, and waits for the other ranks to join.
///
/// # Errors
/// Returns [`Error::RanksTimedOut`] if the other ranks do not join in time, or the error that HCCL reports.
pub(super) fn join(
    npu: &Arc<Npu>,
    id: &HcclId,
    rank: usize,
    ranks: usize,
    limit: Duration,
) -> Result<RankHandle> {
    let (loaded, npu, info) = (loaded()?, Arc::clone(npu), id.raw());
    let made = within(rank, limit, move || {
        let _current = npu.bind()?;
        let mut raw: *mut c_void = std::ptr::null_mut();
        // SAFETY: `raw` is valid for writes; the context of the rank's device is current.
        let code = unsafe {
            loaded.hccl.HcclCommInitRootInfo(ranks as u32, &raw const info, rank as u32, &raw mut raw)
        };
        loaded.check("a start of a group", code)?;
        Ok(RankHandle { raw, npu: Arc::clone(&npu), loaded })
    });
    made?
}

/// Joins devices of this process into a group, in which the first device is rank 0.
///
/// # Errors
/// Returns [`Error::RanksTimedOut`] if HCCL does not start in time, or the error that HCCL reports.
pub(super) fn join_all(devices: &[Arc<Npu>], limit: Duration) -> Result<Vec<RankHandle>> {
    let (loaded, devices) = (loaded()?, devices.to_vec());
    let made = within(0, limit, move || {
        let mut ordinals: Vec<i32> = devices.iter().map(|npu| npu.ordinal).collect();
        let mut raw: Vec<*mut c_void> = vec![std::ptr::null_mut(); devices.len()];
        // Bind in reverse order, so that the first device's context is current at the end.
        let bound = devices.iter().rev().map(|npu| npu.bind()).collect::<Result<Vec<_>>>()?;
        // SAFETY: both lists have one entry per device, and every device is set.
        let code = unsafe {
            loaded.hccl.HcclCommInitAll(devices.len() as u32, ordinals.as_mut_ptr(), raw.as_mut_ptr())
        };
        drop(bound);
        loaded.check("a start of a group", code)?;
        let handle = |(npu, raw): (&Arc<Npu>, _)| RankHandle { raw, npu: Arc::clone(npu), loaded };
        Ok(devices.iter().zip(raw).map(handle).collect())
    });
    made?
}

// Decision: docs/decisions/backend-ascend.md#ranks-join-on-a-separate-thread
/// Runs a call on a separate thread, because the call may wait for other ranks. Waits at most `limit` for its
/// result; a later result is dropped.
fn within<T: Send + 'static>(
    rank: usize,
    limit: Duration,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Result<T>> {
    let (sender, made) = sync_channel(1);
    let thread = std::thread::Builder::new().name("hccl-join".to_owned());
    let started = thread.spawn(move || {
        // The caller may have timed out already.
        let _ = sender.send(call());
    });
    if let Err(error) = started {
        let reason = format!("no thread for the start of a group: {error}");
        return Err(Error::Device { backend: NAME, reason });
    }
    made.recv_timeout(limit).map_err(|_| Error::RanksTimedOut {
        rank,
        call: "the start of the group".to_owned(),
        limit,
    })
}
