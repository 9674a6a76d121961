//! A rank's membership in its group, from joining to leaving, and its NCCL handle.
//!
//! ```text
//!   joining ──► ready ◄──► issuing ──► left      no work is left: the handle is finalised and destroyed
//!      │          │           │
//!      └──────────┴───────────┴──────► aborted   running kernels end, and their results are undefined
//! ```

use std::ffi::c_int;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm, ncclComm_t, ncclConfig_t};
use kvcore::{Collective, Result};
use parking_lot::Mutex;

use super::id::NcclId;
use super::issue;
use super::library::{IN_PROGRESS, Nccl};
use crate::device::CudaDevice;

/// NCCL's marker for an initialised configuration.
const MAGIC: u32 = 0xcafe_beef;
/// The value of a configuration field that leaves the choice to NCCL.
const CHOSEN: c_int = c_int::MIN;

/// The NCCL version that the configuration struct matches. Later versions only append fields.
const CONFIGURED: u32 = 21_800;

// Decision: docs/decisions/backend-cuda.md#no-host-call-waits-for-other-ranks
/// A rank of this process. It makes one NCCL call at a time, and no call except [`leave`](Self::leave) waits
/// for other ranks.
pub(super) struct NcclMember {
    nccl: &'static Nccl,
    device: Arc<CudaDevice>,
    /// The NCCL handle; `None` after the rank has left or aborted.
    handle: Mutex<Option<CommHandle>>,
}

/// The location where NCCL stores its handle, possibly later and in the background. It must not move.
struct CommHandle(Box<AtomicPtr<ncclComm>>);

impl CommHandle {
    /// Returns NCCL's handle, or null if NCCL has not created it yet.
    fn comm(&self) -> ncclComm_t {
        self.0.load(Ordering::Acquire)
    }
}

/// The pauses between polls of NCCL's state. There are no pauses during the first millisecond, so short
/// waits end promptly. The pauses depend on time and not on the number of polls, because on a busy core a
/// thread that yields may get the core back only after milliseconds.
pub(super) struct Pauses {
    since: Instant,
}

impl Pauses {
    /// Starts a wait.
    pub(super) fn new() -> Self {
        Self { since: Instant::now() }
    }

    /// Returns the time since the wait began.
    pub(super) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    pub(super) fn next(&self) {
        const EAGER: Duration = Duration::from_millis(1);
        if self.elapsed() < EAGER {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl NcclMember {
    /// Starts joining a group as one rank. The rank has joined once [`is_ready`](Self::is_ready) returns
    /// true.
    pub(super) fn join(
        nccl: &'static Nccl,
        device: &Arc<CudaDevice>,
        id: &NcclId,
        rank: usize,
        ranks: usize,
    ) -> Result<Self> {
        let _bound = device.bind()?;
        let mut config = config();
        let handle = CommHandle(Box::default());
        // SAFETY: the pointers are valid, and the configuration is initialised as in NCCL's header. The
        // context of the rank's device is current.
        let code = unsafe {
            (nccl.init_rank)(handle.0.as_ptr(), ranks as c_int, id.raw(), rank as c_int, &raw mut config)
        };
        let refused = nccl.check("a start of a group", handle.comm(), code);
        let member = Self { nccl, device: Arc::clone(device), handle: Mutex::new(Some(handle)) };
        refused.map(|()| member)
    }

    /// Returns whether NCCL has finished the most recent host call, or `None` after the rank has left or
    /// aborted.
    pub(super) fn is_ready(&self) -> Option<Result<bool>> {
        self.handle.lock().as_ref().map(|handle| self.ready(handle))
    }

    fn ready(&self, handle: &CommHandle) -> Result<bool> {
        let comm = handle.comm();
        if comm.is_null() {
            return Ok(false);
        }
        let mut state = IN_PROGRESS;
        // SAFETY: the handle is alive, and the pointer is valid.
        let code = unsafe { (self.nccl.async_error)(comm, &raw mut state) };
        self.nccl.check("the state of a group", comm, code)?;
        self.nccl.check("the group has failed", comm, state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Passes a collective to NCCL. The collective is enqueued on `stream` once [`is_ready`](Self::is_ready)
    /// returns true. Returns `None` after the rank has left or aborted.
    ///
    /// # Safety
    /// The views must be in memory of the member's device or its pinned host memory, and must stay alive
    /// until the work is done.
    pub(super) unsafe fn issue(
        &self,
        collective: Collective<'_>,
        rank: usize,
        stream: CUstream,
    ) -> Option<Result<()>> {
        let handle = self.handle.lock();
        let comm = handle.as_ref()?.comm();
        Some(self.device.bind().and_then(|_bound| {
            // SAFETY: the handle is alive, and the caller guarantees that the views' memory is valid.
            unsafe { issue::collective(self.nccl, comm, stream, rank, collective) }
        }))
    }

    /// Aborts the rank's work. The rank cannot be used again.
    pub(super) fn abort(&self) {
        let handle = self.handle.lock().take();
        if let Some(handle) = handle {
            self.abort_taken(handle);
        }
    }

    fn abort_taken(&self, handle: CommHandle) {
        let comm = handle.comm();
        if comm.is_null() {
            // NCCL may still store a handle at this location, which must therefore stay valid.
            return std::mem::forget(handle);
        }
        // The abort also frees what a lost device has left behind.
        let _bound = self.device.bind();
        // SAFETY: the handle was taken out of the lock, so nothing else uses it.
        let _ = unsafe { (self.nccl.abort)(comm) };
    }

    /// Leaves the group. May wait for other ranks on the same machine, because NCCL makes all of them leave
    /// together.
    pub(super) fn leave(&self, limit: Duration) {
        let handle = self.handle.lock().take();
        let Some(handle) = handle else { return };
        let comm = handle.comm();
        let Ok(_bound) = self.device.bind() else { return self.abort_taken(handle) };
        // SAFETY: the handle was taken out of the lock, so nothing else uses it.
        let code = unsafe { (self.nccl.finalize)(comm) };
        let mut left = self.nccl.check("the end of a group", comm, code).map(|()| false);
        let pauses = Pauses::new();
        while left == Ok(false) && pauses.elapsed() < limit {
            pauses.next();
            left = self.ready(&handle);
        }
        if left == Ok(true) {
            // SAFETY: the handle was taken out of the lock, and its finalisation is done.
            let _ = unsafe { (self.nccl.destroy)(comm) };
        } else {
            self.abort_taken(handle);
        }
    }
}

impl Drop for NcclMember {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Returns a configuration under which no call waits for other ranks.
fn config() -> ncclConfig_t {
    // SAFETY: all zeros is a valid value of a plain C struct. NCCL reads only the fields that `size` covers.
    let mut config: ncclConfig_t = unsafe { std::mem::zeroed() };
    config.size = offset_of!(ncclConfig_t, trafficClass);
    config.magic = MAGIC;
    config.version = CONFIGURED;
    config.blocking = 0;
    (config.cgaClusterSize, config.minCTAs, config.maxCTAs, config.splitShare) =
        (CHOSEN, CHOSEN, CHOSEN, CHOSEN);
    config
}
