//! The preparation of one operation: what its kernels read is sent up, what it uses is held, its launches are listed.

use std::ffi::c_void;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::CUstream;
use kvcore::{BlockId, MemoryKind, Result, Rope, Storage, WritePairs, WriteSlots};
use smallvec::SmallVec;

use super::capture::{Recording, uncapturable};
use super::flight::Held;
use super::inputs::List;
use super::lists::{ListKey, ListOwner};
use super::{Queue, StreamState};
use crate::device::Device;
use crate::memory::CudaStorage;
use crate::module::Kernel;

/// A launch of a kernel: its grid, its blocks and its argument.
pub(crate) struct Launch {
    pub(super) kernel: Kernel,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// The argument, in words so that it is aligned.
    args: SmallVec<[u64; 32]>,
}

impl Launch {
    /// Describes a launch. The caller guarantees that `args` is the kernel's argument, as its source declares it.
    pub(crate) fn new<A: Pod>(kernel: Kernel, grid: [u32; 3], threads: u32, shared: u32, args: &A) -> Self {
        let mut words: SmallVec<[u64; 32]> = SmallVec::new();
        words.resize(size_of::<A>().div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut words[..])[..size_of::<A>()].copy_from_slice(bytemuck::bytes_of(args));
        Self { kernel, grid, threads, shared, args: words }
    }

    pub(super) fn argument(&mut self) -> *mut c_void {
        self.args.as_mut_ptr().cast()
    }
}

/// An operation on its way to the device.
pub(crate) struct Lowering<'a> {
    stream: &'a StreamState,
    queue: &'a mut Queue,
    /// The capture that the operation enters, if any.
    recording: Option<&'a mut Recording>,
    launches: SmallVec<[Launch; 2]>,
}

impl<'a> Lowering<'a> {
    pub(super) fn new(
        stream: &'a StreamState,
        queue: &'a mut Queue,
        recording: Option<&'a mut Recording>,
    ) -> Self {
        Self { stream, queue, recording, launches: SmallVec::new() }
    }

    /// Returns the capture that the operation enters.
    pub(crate) fn recording(&mut self) -> Option<&mut Recording> {
        self.recording.as_deref_mut()
    }

    pub(super) fn launches(self) -> SmallVec<[Launch; 2]> {
        self.launches
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.stream.device
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.stream.raw
    }

    /// Adds a launch. A grid without blocks is left out.
    pub(crate) fn launch(&mut self, launch: Launch) {
        if !launch.grid.contains(&0) {
            self.launches.push(launch);
        }
    }

    /// Holds something until the operation is done.
    pub(crate) fn hold(&mut self, held: Held) {
        match self.recording() {
            Some(recording) => recording.hold(held),
            None => self.queue.in_flight.hold(held),
        }
    }

    /// Sends a list up and returns its address on the device, a multiple of 256.
    pub(crate) fn upload<T: Pod>(&mut self, list: &[T]) -> Result<u64> {
        if let Some(recording) = self.recording.as_deref_mut() {
            return recording.constant(&self.stream.device, bytemuck::cast_slice(list));
        }
        let upload = self.send(bytemuck::cast_slice(list))?;
        let address = upload.address();
        self.hold(Held::Upload(upload));
        Ok(address)
    }

    /// Sends tokens up, each below `limit`, and returns their address.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] in a capture whose step has other tokens, and the errors of the device.
    pub(crate) fn tokens(&mut self, tokens: &[u32], limit: usize) -> Result<u64> {
        let Some(recording) = self.recording.as_deref_mut() else { return self.upload(tokens) };
        if !super::recheck::one(tokens, &recording.step().tokens) {
            return Err(uncapturable("an embedding of tokens that are not those of the step"));
        }
        recording.input(&self.stream.device, List::Tokens { limit }, size_of_val(tokens))
    }

    /// Returns the address of a list of `bytes` bytes that each replay of the graph writes.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] outside of a capture, and the errors of the device.
    pub(crate) fn input(&mut self, list: List, bytes: usize) -> Result<u64> {
        match self.recording.as_deref_mut() {
            Some(recording) => recording.input(&self.stream.device, list, bytes),
            None => Err(uncapturable("a list of no capture")),
        }
    }

    /// Sends bytes up for a list that the caller keeps. The caller holds it for each operation that uses it.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Arc<super::upload::Upload>> {
        self.queue.uploads.send(&self.stream.device, self.stream.raw, bytes)
    }

    /// Sends slots or positions up as they are, once for all operations that share the list.
    pub(crate) fn numbers(&mut self, list: &Arc<[i64]>) -> Result<u64> {
        if let Some(recording) = self.recording.as_deref_mut()
            && super::recheck::one(list, &recording.step().positions)
        {
            return recording.input(&self.stream.device, List::Positions, size_of_val(&list[..]));
        }
        let key = ListKey::Numbers(list.as_ptr() as usize, list.len());
        self.kept(key, || ListOwner::Numbers(Arc::clone(list)), |_| list.to_vec())
    }

    /// Sends slots up for an operation that writes them: of rows with the same slot, all but the last become
    /// padding, because two rows that are written to one slot at the same time would mix.
    pub(crate) fn written_slots(&mut self, list: &WriteSlots) -> Result<u64> {
        if self.recording.is_some() {
            return self.input(List::Slots, size_of_val(&list[..]));
        }
        let key = ListKey::Written(list.as_ptr() as usize, list.len());
        self.kept(key, || ListOwner::Slots(list.clone()), |sorting| super::lists::last_of_each(list, sorting))
    }

    /// Sends pairs of blocks up, each as two 32-bit numbers: source and destination.
    pub(crate) fn pairs(&mut self, pairs: &WritePairs) -> Result<u64> {
        let key = ListKey::Pairs(pairs.as_ptr() as usize, pairs.len());
        let words = |pair: &(BlockId, BlockId)| {
            i64::from_ne_bytes(bytemuck::cast([pair.0.index() as u32, pair.1.index() as u32]))
        };
        self.kept(key, || ListOwner::Pairs(pairs.clone()), |_| pairs.iter().map(words).collect())
    }

    fn kept(
        &mut self,
        key: ListKey,
        owner: impl FnOnce() -> ListOwner,
        make: impl FnOnce(&mut Vec<(i64, usize)>) -> Vec<i64>,
    ) -> Result<u64> {
        if let Some(recording) = self.recording.as_deref_mut() {
            let list = make(&mut self.queue.sorting);
            return recording.constant(&self.stream.device, bytemuck::cast_slice(&list));
        }
        let upload = if let Some(known) = self.queue.lists.get(key) {
            known
        } else {
            let list = make(&mut self.queue.sorting);
            let upload = self.send(bytemuck::cast_slice(&list))?;
            self.queue.lists.keep(key, owner(), &upload);
            upload
        };
        let address = upload.address();
        self.hold(Held::Upload(upload));
        Ok(address)
    }

    /// Returns the address of a RoPE table: for each position, a pair `(cos, sin)` of f32 for each pair of elements.
    pub(crate) fn angles(&mut self, rope: &Rope) -> Result<u64> {
        let angles = self.stream.tables.angles(&self.stream.device, rope)?;
        let address = angles.address();
        self.hold(Held::Storage(angles));
        Ok(address)
    }

    /// Returns memory in which a kernel leaves results for the next kernel of the same operation. All operations of
    /// the stream share it, because they run one after the other.
    pub(crate) fn scratch(&mut self, bytes: usize) -> Result<u64> {
        if let Some(recording) = self.recording.as_deref_mut() {
            return recording.scratch(self.stream, bytes);
        }
        let known = self.queue.scratch.take().filter(|known| known.len() >= bytes);
        let scratch = if let Some(known) = known {
            known
        } else {
            let bytes = bytes.next_power_of_two().max(1 << 16);
            Arc::new(CudaStorage::allocate(&self.stream.device, MemoryKind::Device, bytes)?)
                as Arc<dyn Storage>
        };
        let address = scratch.address();
        self.hold(Held::Storage(Arc::clone(&scratch)));
        self.queue.scratch = Some(scratch);
        Ok(address)
    }

    /// Returns the plans of attention that the layers of a step share.
    pub(crate) fn plans(&mut self) -> &mut crate::kernels::Plans {
        match self.recording.as_deref_mut() {
            Some(recording) => &mut recording.plans,
            None => &mut self.queue.plans,
        }
    }
}
