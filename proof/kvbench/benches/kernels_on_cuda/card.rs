//! The card: its stream, its timers, and the driver's own copies.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use kvbackend_cuda::CudaBackend;
use kvbackend_cuda::cudarc::driver::result::stream::StreamKind;
use kvbackend_cuda::cudarc::driver::result::{self, DriverError};
use kvbackend_cuda::cudarc::driver::sys::{self, CUevent, CUevent_flags, CUstream};
use kvcore::{Backend, MemoryKind, Result, Storage, Stream};

/// The maximum size of a limit's single copy, in bytes. Longer copies are split. Shorter copies use
/// successive parts of the same memory, so their source is never in a cache.
const ROOM: usize = 1 << 30;

/// The number of batches for each piece of work. The result is their median.
const BATCHES: usize = 7;

/// The target duration of a batch, in seconds.
const BATCH_SECONDS: f64 = 5e-3;

/// The maximum number of launches per batch. It is less than the device can queue before the host has to
/// wait.
const MOST_LAUNCHES: f64 = 64.0;

/// The time to keep the device busy while the host enqueues a batch, as a multiple of the time that
/// enqueuing takes.
const HEAD_START: f64 = 1.5;

/// A function that enqueues the work.
type Work<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The machine's first card.
pub(crate) struct Card {
    pub(crate) backend: Arc<CudaBackend>,
    pub(crate) stream: Arc<dyn Stream>,
    /// The driver's handle for the stream.
    pub(crate) raw: CUstream,
    /// True if the driver is the test double, which runs kernels on the CPU.
    pub(crate) is_double: bool,
    /// The device memory that was free at the start, in bytes.
    pub(crate) free: usize,
    events: [CUevent; 2],
    /// The source and the destination of the limits' copies.
    room: [Arc<dyn Storage>; 2],
    /// Pinned memory, for limits that copy to and from the host.
    pinned: Arc<dyn Storage>,
    /// The offset of the next byte that a limit copies.
    next: Cell<usize>,
    /// Seconds to copy the whole buffer.
    busy: f64,
}

fn refused(error: DriverError) -> ! {
    panic!("the driver refuses a call of the clock: {error}")
}

impl Card {
    /// Opens device 0. Its context stays current on this thread.
    pub(crate) fn open() -> Result<Self> {
        let backend = CudaBackend::new()?;
        let is_double = backend.description().contains("test double");
        // SAFETY: the backend retains the same context, so it stays alive. Both end with this process.
        let bound = unsafe {
            result::device::get(0)
                .and_then(|device| result::primary_ctx::retain(device))
                .and_then(|context| result::ctx::set_current(context))
        };
        bound.unwrap_or_else(|error| refused(error));
        let raw = result::stream::create(StreamKind::NonBlocking).unwrap_or_else(|error| refused(error));
        // SAFETY: the stream was just created in the backend's context and is never destroyed.
        let stream: Arc<dyn Stream> = Arc::new(unsafe { backend.lent_stream(raw, Arc::new(())) }?);
        let bytes = if is_double { 1 << 20 } else { ROOM };
        let take = |kind| backend.allocate(kind, bytes);
        let room = [take(MemoryKind::Device)?, take(MemoryKind::Device)?];
        let pinned = take(MemoryKind::Pinned)?;
        let event = || result::event::create(CUevent_flags::CU_EVENT_DEFAULT);
        let events = [event(), event()].map(|event| event.unwrap_or_else(|error| refused(error)));
        let (free, _) = result::mem_get_info().unwrap_or_else(|error| refused(error));
        let next = Cell::new(0);
        let mut card = Self { backend, stream, raw, is_double, free, events, room, pinned, next, busy: 0.0 };
        for storage in card.room.clone() {
            card.fill(&storage);
        }
        let mut whole = || {
            card.copy(raw, bytes);
            Ok(())
        };
        card.batch(raw, 1, &mut whole)?;
        let busy = card.batch(raw, 4, &mut whole)?;
        card.busy = busy;
        Ok(card)
    }

    /// Returns the card's name.
    pub(crate) fn name(&self) -> String {
        self.backend.description()
    }

    /// Fills memory with numbers, because products of zeros take less power and time. The pattern is finite
    /// and moderate in every element type and every quantised format.
    pub(crate) fn fill(&self, storage: &Arc<dyn Storage>) {
        let mut state = 1u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // A sign, an exponent around 1, and a lower byte that is neither NaN in fp8 nor −128.
            (state >> 16) as u16 & 0x837b | 0x3c00
        };
        let pattern: Vec<u8> = (0..1 << 19).flat_map(|_| number().to_le_bytes()).collect();
        let (at, len) = (storage.address(), storage.len());
        let first = pattern.len().min(len);
        let raw = self.raw;
        // SAFETY: all ranges are inside the storage, which lives until the wait. No other work uses it.
        let filled = unsafe {
            result::memcpy_htod_sync(at, &pattern[..first]).and_then(|()| {
                let mut done = first;
                while done < len {
                    let part = done.min(len - done);
                    result::memcpy_dtod_async(at + done as u64, at, part, raw)?;
                    done += part;
                }
                result::stream::synchronize(raw)
            })
        };
        filled.unwrap_or_else(|error| refused(error));
    }

    /// Enqueues a copy of `bytes` bytes within the device.
    pub(crate) fn copy(&self, stream: CUstream, bytes: usize) {
        let [src, dst] = self.room.each_ref().map(|storage| storage.address());
        self.walk(bytes, |at, part| {
            // SAFETY: the range is inside both storages, which live as long as the card.
            unsafe { result::memcpy_dtod_async(dst + at, src + at, part, stream) }
        });
    }

    /// Enqueues a copy of `bytes` bytes to pinned memory, or back from it.
    pub(crate) fn copy_to_host(&self, stream: CUstream, bytes: usize, back: bool) {
        let (device, host) = (self.room[0].address(), self.pinned.address());
        self.walk(bytes, |at, part| {
            let (src, dst) = if back { (host + at, device + at) } else { (device + at, host + at) };
            // SAFETY: the range is inside both storages, which live as long as the card. Pinned memory has a
            // device address.
            let status = unsafe { sys::cuMemcpyAsync(dst, src, part, stream) };
            status.result()
        });
    }

    /// Calls `copy` with successive parts of the buffer that add up to `bytes` bytes.
    fn walk(&self, bytes: usize, mut copy: impl FnMut(u64, usize) -> std::result::Result<(), DriverError>) {
        let room = self.room[0].len();
        let mut left = bytes;
        while left > 0 {
            let part = left.min(room);
            let at = if self.next.get() + part > room { 0 } else { self.next.get() };
            copy(at as u64, part).unwrap_or_else(|error| refused(error));
            self.next.set(at + part);
            left -= part;
        }
    }

    /// Returns the seconds per launch over `launches` launches, measured by device events.
    fn batch(&self, stream: CUstream, launches: usize, work: Work<'_>) -> Result<f64> {
        self.after_copies(stream, 0, launches, work).map(|(seconds, _)| seconds)
    }

    /// Keeps the device busy with `copies` copies of the buffer, and enqueues a batch after them. Returns the
    /// seconds per launch, and the seconds that the host took to enqueue everything.
    fn after_copies(
        &self,
        stream: CUstream,
        copies: usize,
        launches: usize,
        work: Work<'_>,
    ) -> Result<(f64, f64)> {
        for _ in 0..copies {
            self.copy(stream, self.room[0].len());
        }
        let [start, end] = self.events;
        // SAFETY: the events and the stream belong to the current context and live until the program ends.
        let record = |event| unsafe { result::event::record(event, stream) };
        record(start).unwrap_or_else(|error| refused(error));
        let began = Instant::now();
        for _ in 0..launches {
            work()?;
        }
        let host = began.elapsed().as_secs_f64();
        record(end).unwrap_or_else(|error| refused(error));
        // SAFETY: both events belong to the current context, live until the program ends and are recorded on
        // one stream.
        let elapsed =
            unsafe { result::event::synchronize(end).and_then(|()| result::event::elapsed(start, end)) };
        let milliseconds = elapsed.unwrap_or_else(|error| refused(error));
        Ok((f64::from(milliseconds) * 1e-3 / launches as f64, host))
    }

    /// Returns the median seconds for each piece of work. They take turns, in batches that are enqueued while
    /// copies keep the device busy.
    pub(crate) fn in_turns<const N: usize>(&self, mut works: [(CUstream, Work<'_>); N]) -> Result<[f64; N]> {
        let mut plans = [(1, 0); N];
        for ((stream, work), plan) in works.iter_mut().zip(&mut plans) {
            // The first launches load the kernels and upload lists.
            self.batch(*stream, 1, work)?;
            if self.is_double {
                continue;
            }
            let seconds = self.batch(*stream, 2, work)?;
            let launches = (BATCH_SECONDS / seconds).ceil().clamp(1.0, MOST_LAUNCHES) as usize;
            let (_, host) = self.after_copies(*stream, 0, launches, work)?;
            *plan = (launches, (HEAD_START * host / self.busy).ceil() as usize);
        }
        let mut seconds: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
        for _ in 0..if self.is_double { 1 } else { BATCHES } {
            for (i, (stream, work)) in works.iter_mut().enumerate() {
                let (launches, copies) = plans[i];
                seconds[i].push(self.after_copies(*stream, copies, launches, work)?.0);
            }
        }
        Ok(seconds.map(|mut all| {
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        }))
    }

    /// Compares work on the card's stream, which moves `bytes` bytes, with the driver's copy of `copied`
    /// bytes.
    pub(crate) fn against_copy(
        &self,
        what: &str,
        bytes: usize,
        copied: usize,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let raw = self.raw;
        let mut limit = || {
            self.copy(raw, copied);
            Ok(())
        };
        let [seconds, limit] = self.in_turns([(raw, &mut work), (raw, &mut limit)])?;
        let name = if copied == bytes { "cuMemcpyDtoD" } else { "cuMemcpyDtoD of half" };
        self.row(what, (bytes as f64, "bytes"), seconds, name, limit);
        Ok(())
    }

    /// Like [`against_copy`](Self::against_copy), but compares with a copy of the same number of bytes to the
    /// host or back.
    pub(crate) fn against_host(
        &self,
        what: &str,
        bytes: usize,
        back: bool,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let raw = self.raw;
        let mut limit = || {
            self.copy_to_host(raw, bytes, back);
            Ok(())
        };
        let [seconds, limit] = self.in_turns([(raw, &mut work), (raw, &mut limit)])?;
        self.row(what, (bytes as f64, "bytes"), seconds, "cuMemcpy, pinned memory", limit);
        Ok(())
    }

    /// Prints one row.
    pub(crate) fn row(&self, what: &str, (size, unit): (f64, &str), seconds: f64, limit: &str, at: f64) {
        let line = serde_json::json!({
            "what": format!("cuda: {what}"), "size": size, "unit": unit, "seconds": seconds,
            "limit": limit, "limit_seconds": at, "ratio": at / seconds, "double": self.is_double,
        });
        println!("{line}");
    }
}
