//! Preparation of one operation: uploads the lists that its kernels read, holds the memory that it uses, and
//! collects its launches.

use std::ffi::c_void;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result;
use kvcore::device::queue::{CapturedStream, Hold};
use kvcore::{BlockId, MemoryKind, Result, Rope, Storage, TensorView, WritePairs, WriteSlots};
use smallvec::SmallVec;

use super::capture::{CudaRecording, uncapturable};
use super::lists::{SentKey, SentOwner, StepList, last_of_each};
use super::plans::AttendPlans;
use super::raw::RawStream;
use super::state::{CudaQueue, CudaStream, CudaStreamState};
use super::upload::CudaUpload;
use crate::device::CudaDevice;
use crate::memory::{self, CudaStorage};
use crate::module::CudaKernel;

/// The minimum size of scratch memory in bytes.
const LEAST_SCRATCH: usize = 1 << 16;

/// The alignment of a captured step's lists, in bytes.
const ALIGNED: usize = 256;

/// A kernel launch: its grid, its block size and its argument.
pub(crate) struct Launch {
    kernel: CudaKernel,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    // Decision: docs/decisions/backend-cuda.md#a-kernel-takes-one-struct-and-uses-dynamic-shared-memory-only
    /// The kernel's argument, stored as 8-byte words to align it.
    args: SmallVec<[u64; 32]>,
}

impl Launch {
    /// Describes a launch. `args` must be the kernel's argument as declared in its source.
    pub(crate) fn new<A: Pod>(
        kernel: CudaKernel,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        args: &A,
    ) -> Self {
        let mut words: SmallVec<[u64; 32]> = SmallVec::new();
        words.resize(size_of::<A>().div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut words[..])[..size_of::<A>()].copy_from_slice(bytemuck::bytes_of(args));
        Self { kernel, grid, threads, shared, args: words }
    }

    fn argument(&mut self) -> *mut c_void {
        self.args.as_mut_ptr().cast()
    }
}

impl CudaStream {
    /// Enqueues the launches that `prepare` adds. If `prepare` fails or a kernel cannot be loaded, no launch
    /// is enqueued.
    pub(crate) fn enqueue(&self, prepare: impl FnOnce(&mut Lowering<'_>) -> Result<()>) -> Result<()> {
        self.state.recorded(|recording| self.enqueue_in(recording, prepare))
    }

    fn enqueue_in(
        &self,
        recording: Option<&mut CudaRecording>,
        prepare: impl FnOnce(&mut Lowering<'_>) -> Result<()>,
    ) -> Result<()> {
        let CudaStreamState { on, queue, .. } = &*self.state;
        let device = &on.device;
        let _bound = device.bind()?;
        let mut queue = queue.lock();
        let captured = recording.is_some();
        let (stream, launches) = (&*self.state, SmallVec::new());
        let mut lowering = Lowering { stream, queue: &mut queue, recording, launches };
        prepare(&mut lowering)?;
        let launches = lowering.launches;
        let mut functions: SmallVec<[_; 2]> = SmallVec::new();
        for launch in &launches {
            functions.push(device.kernel(launch.kernel)?);
        }
        for (function, mut launch) in functions.into_iter().zip(launches) {
            let mut argument = [launch.argument()];
            // SAFETY: the argument is the kernel's struct. The memory whose addresses it contains belongs to
            // this device and is held until the work is done: `Stream::run` and the dense steps have checked
            // this.
            unsafe {
                let (grid, block) =
                    ((launch.grid[0], launch.grid[1], launch.grid[2]), (launch.threads, 1, 1));
                result::launch_kernel(function, grid, block, launch.shared, on.raw, &mut argument)
            }
            .map_err(|error| device.refused(error))?;
        }
        if captured { Ok(()) } else { queue.in_flight.tidy(on) }
    }

    /// Enqueues the zeroing of a dense view.
    pub(crate) fn zero(&self, view: &TensorView) -> Result<()> {
        let range = view.host_range(view.dtype().bytes_for(view.len())?)?;
        let RawStream { device, raw } = &self.state.on;
        memory::of(device, view.storage())?;
        self.enqueue(|to| {
            to.hold(Hold::Storage(Arc::clone(view.storage())));
            if range.is_empty() {
                return Ok(());
            }
            let at = view.storage().address() + range.start as u64;
            // SAFETY: the range is in the storage, which is held until the work is done.
            unsafe { result::memset_d8_async(at, 0, range.len(), *raw) }
                .map_err(|error| device.refused(error))
        })
    }
}

/// An operation that is being prepared.
pub(crate) struct Lowering<'a> {
    stream: &'a CudaStreamState,
    queue: &'a mut CudaQueue,
    /// The capture that records the operation, if there is one.
    recording: Option<&'a mut CudaRecording>,
    launches: SmallVec<[Launch; 2]>,
}

impl Lowering<'_> {
    /// Returns the capture that records the operation, if there is one.
    pub(crate) fn recording(&mut self) -> Option<&mut CudaRecording> {
        self.recording.as_deref_mut()
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.stream.on.device
    }

    pub(crate) fn stream(&self) -> &RawStream {
        &self.stream.on
    }

    /// Adds a launch, unless its grid is empty.
    pub(crate) fn launch(&mut self, launch: Launch) {
        if !launch.grid.contains(&0) {
            self.launches.push(launch);
        }
    }

    /// Holds an object until the operation is done.
    pub(crate) fn hold(&mut self, hold: Hold) {
        match self.recording() {
            Some(recording) => recording.hold(hold),
            None => self.queue.in_flight.hold(hold),
        }
    }

    /// Uploads a list and returns its device address, which is a multiple of 256.
    pub(crate) fn upload<T: Pod>(&mut self, list: &[T]) -> Result<u64> {
        let bytes = bytemuck::cast_slice(list);
        if self.recording.is_some() {
            return self.constant(bytes);
        }
        let upload = self.send(bytes)?;
        Ok(self.held(upload))
    }

    /// Uploads token IDs, which must all be below `limit`, and returns their device address.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] in a capture if these are not the step's tokens, or a device
    /// error.
    pub(crate) fn tokens(&mut self, tokens: &[u32], limit: usize) -> Result<u64> {
        let Some(recording) = self.recording() else { return self.upload(tokens) };
        if !is_same(tokens, &recording.step().tokens) {
            return Err(uncapturable("an embedding of other tokens than the step's"));
        }
        self.input(StepList::Tokens { limit }, size_of_val(tokens))
    }

    /// Returns the device address of a list of `bytes` bytes that each replay of the graph writes.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] outside a capture, or a device error.
    pub(crate) fn input(&mut self, list: StepList, bytes: usize) -> Result<u64> {
        let device = &self.stream.on.device;
        let recording = self.recording.as_mut().ok_or_else(|| uncapturable("a list of no capture"))?;
        let lists = &mut recording.notes().lists;
        match lists.find(|known| known.is(&list)) {
            Some(address) => Ok(address),
            None => lists.add(list, bytes, ALIGNED, |bytes| allocate(device, bytes)),
        }
    }

    /// Uploads a list that does not change between the replays of a captured graph, and returns its device
    /// address.
    fn constant(&mut self, bytes: &[u8]) -> Result<u64> {
        let storage = CudaStorage::allocate(self.device(), MemoryKind::Device, bytes.len().max(1))?;
        storage.fill(bytes)?;
        let address = storage.address();
        self.hold(Hold::Storage(Arc::new(storage)));
        Ok(address)
    }

    /// Uploads a list that the caller keeps. The caller must hold the returned upload for each operation that
    /// uses it.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Arc<CudaUpload>> {
        self.queue.uploads.send(&self.stream.on, bytes)
    }

    /// Holds an uploaded list until the operation is done, and returns its device address.
    fn held(&mut self, upload: Arc<CudaUpload>) -> u64 {
        let address = upload.address();
        self.hold(Hold::Other(upload));
        address
    }

    /// Uploads slots or positions unchanged, once for all operations that share the list. Returns their
    /// device address.
    pub(crate) fn numbers(&mut self, list: &Arc<[i64]>) -> Result<u64> {
        let of_step = |recording: &mut CudaRecording| is_same(list, &recording.step().positions);
        if self.recording().is_some_and(of_step) {
            return self.input(StepList::Positions, size_of_val(&list[..]));
        }
        let key = SentKey::Numbers(list.as_ptr() as usize, list.len());
        self.kept(key, || SentOwner::Numbers(Arc::clone(list)), |_| list.to_vec())
    }

    /// Uploads slots for an operation that writes to them, and returns their device address. If several rows
    /// have the same slot, all but the last become padding, because rows written to one slot at the same time
    /// could mix.
    pub(crate) fn written_slots(&mut self, list: &WriteSlots) -> Result<u64> {
        if self.recording.is_some() {
            return self.input(StepList::Slots, size_of_val(&list[..]));
        }
        let key = SentKey::Written(list.as_ptr() as usize, list.len());
        self.kept(key, || SentOwner::Slots(list.clone()), |sorting| last_of_each(list, sorting))
    }

    /// Uploads pairs of blocks, each as two 32-bit indices (source and destination), and returns their device
    /// address.
    pub(crate) fn pairs(&mut self, pairs: &WritePairs) -> Result<u64> {
        let key = SentKey::Pairs(pairs.as_ptr() as usize, pairs.len());
        let words = |pair: &(BlockId, BlockId)| {
            i64::from_ne_bytes(bytemuck::cast([pair.0.index() as u32, pair.1.index() as u32]))
        };
        self.kept(key, || SentOwner::Pairs(pairs.clone()), |_| pairs.iter().map(words).collect())
    }

    fn kept(
        &mut self,
        key: SentKey,
        owner: impl FnOnce() -> SentOwner,
        make: impl FnOnce(&mut Vec<(i64, usize)>) -> Vec<i64>,
    ) -> Result<u64> {
        if self.recording.is_some() {
            let list = make(&mut self.queue.sorting);
            return self.constant(bytemuck::cast_slice(&list));
        }
        if let Some((_, known)) = self.queue.lists.get(&key) {
            let known = Arc::clone(known);
            return Ok(self.held(known));
        }
        let list = make(&mut self.queue.sorting);
        let upload = self.send(bytemuck::cast_slice(&list))?;
        self.queue.lists.keep(key, (owner(), Arc::clone(&upload)));
        Ok(self.held(upload))
    }

    /// Returns the device address of a RoPE table, which has a pair `(cos, sin)` in f32 for each position and
    /// each pair of elements.
    pub(crate) fn angles(&mut self, rope: &Rope) -> Result<u64> {
        let angles = self.stream.tables.angles(self.device(), rope)?;
        let address = angles.address();
        self.hold(Hold::Storage(angles));
        Ok(address)
    }

    /// Returns the address of memory in which a kernel leaves results for the operation's next kernel. All
    /// operations of the stream share this memory, because they run one after another. Graphs have separate
    /// scratch memory, because they may run at the same time as work outside of graphs.
    pub(crate) fn scratch(&mut self, bytes: usize) -> Result<u64> {
        let device = &self.stream.on.device;
        let make = || allocate(device, bytes.next_power_of_two().max(LEAST_SCRATCH));
        let scratch = if let Some(recording) = self.recording.as_deref_mut() {
            recording.home().graph_scratch.lock().of(self.stream.on.raw as usize, bytes, make)?
        } else {
            let known = self.queue.scratch.take().filter(|known| known.len() >= bytes);
            let scratch = known.map_or_else(make, Ok)?;
            self.queue.scratch.insert(scratch).clone()
        };
        let address = scratch.address();
        self.hold(Hold::Storage(scratch));
        Ok(address)
    }

    /// Returns the attention plans that a step's layers share.
    pub(crate) fn plans(&mut self) -> &mut AttendPlans {
        match self.recording.as_deref_mut() {
            Some(recording) => &mut recording.notes().plans,
            None => &mut self.queue.plans,
        }
    }
}

/// Returns whether two slices are the same memory range.
fn is_same<T>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b)
}

fn allocate(device: &Arc<CudaDevice>, bytes: usize) -> Result<Arc<dyn Storage>> {
    Ok(Arc::new(CudaStorage::allocate(device, MemoryKind::Device, bytes)?))
}
