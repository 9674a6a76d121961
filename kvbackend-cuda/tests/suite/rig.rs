//! The conformance suite's cases for devices and groups, run on this backend, with the driver or its test
//! double.

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cuda::{CudaBackend, CudaOptions, NcclCommunicator, NcclId};
use kvconform::Outcome;
use kvconform::devices::{DeviceRig, DriverDouble, DriverFault, GroupRig, Holdings, Queued};
use kvcore::{Backend, CopyTensor, DType, MemoryKind, Result, TensorView, allocate_tensor};

use crate::double::{Double, SMALL, alone, double};

/// The driver's code for an invalid argument.
const INVALID_VALUE: i32 = 1;
/// The driver's code for exhausted memory.
const OUT_OF_MEMORY: i32 = 2;
/// The driver's code for an access to an invalid address.
const ILLEGAL_ADDRESS: i32 = 700;

/// NCCL's code for a system error.
const SYSTEM_ERROR: i32 = 2;

/// Devices and groups of the driver and NCCL, or of their doubles.
struct CudaRig;

impl DriverDouble for Double {
    fn live(&self, device: usize) -> Holdings {
        Holdings { bytes: self.live_bytes(device), pinned: 0, objects: self.live_objects(device) as usize }
    }

    fn queued(&self, device: usize) -> Queued {
        let trace = self.trace(device);
        let count = |kind: &str| trace.iter().filter(|line| line[0] == kind).count();
        Queued {
            kernels: count("kernel"),
            graphs: count("graph"),
            uploads: count("memcpy_htod"),
            peer_copies: count("memcpy_peer"),
        }
    }

    fn fail(&self, function: &str, after: usize, code: i32) {
        Self::fail(self, function, after as i32, code);
    }

    fn fault(&self, fault: DriverFault) -> (&'static str, i32) {
        match fault {
            DriverFault::DeviceMemory => ("cuMemAllocFromPoolAsync", OUT_OF_MEMORY),
            DriverFault::PinnedMemory => ("cuMemHostAlloc", OUT_OF_MEMORY),
            DriverFault::LostInWait => ("cuStreamSynchronize", ILLEGAL_ADDRESS),
        }
    }

    fn ignore(&self, function: &str, on: bool) {
        Self::ignore(self, function, on);
    }

    fn limit(&self, device: usize, bytes: Option<usize>) {
        let usual = if device == SMALL { 64 << 20 } else { 2 << 30 };
        Self::limit(self, device, bytes.unwrap_or(usual));
    }

    fn reset(&self) {
        Self::reset(self);
    }
}

impl DeviceRig for CudaRig {
    type Backend = CudaBackend;

    fn open(&self, device: usize) -> Result<Arc<CudaBackend>> {
        CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() })
    }

    fn double(&self) -> Option<&dyn DriverDouble> {
        double().map(|double| double as _)
    }

    fn copy_of_freed_memory(&self, backend: &Arc<CudaBackend>) -> Result<CopyTensor> {
        let owned = backend.allocate(MemoryKind::Device, 4096)?;
        // SAFETY: the memory is freed below on purpose, as the cases require: the device faults, but the
        // process does not.
        let lent = unsafe { backend.lent(owned.address(), 4096, Arc::new(())) }?;
        drop(owned);
        let src = TensorView::new(Arc::new(lent), DType::U8, &[4096])?;
        let dst = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[4096])?;
        Ok(CopyTensor { src, dst })
    }
}

impl GroupRig for CudaRig {
    type Communicator = NcclCommunicator;
    type Id = NcclId;

    fn group(&self, backends: &[Arc<CudaBackend>], limit: Duration) -> Result<Vec<NcclCommunicator>> {
        NcclCommunicator::group(backends, limit)
    }

    fn id(&self, _: &Arc<CudaBackend>) -> Result<NcclId> {
        Ok(NcclId::from_bytes(*NcclId::new()?.as_bytes()))
    }

    fn join(
        &self,
        backend: &Arc<CudaBackend>,
        id: &NcclId,
        rank: usize,
        ranks: usize,
        limit: Duration,
    ) -> Result<NcclCommunicator> {
        NcclCommunicator::new(backend, id, rank, ranks, limit)
    }

    fn foreign(&self) -> Arc<dyn Backend> {
        kvbackend_cpu::CpuBackend::new()
    }
}

/// Runs cases while no other test uses the test double.
fn run(cases: impl FnOnce() -> Outcome) {
    let _alone = alone();
    if let Err(failure) = cases() {
        panic!("{failure}");
    }
}

#[test]
fn devices_pass_the_cases_of_devices() {
    run(|| kvconform::run_devices(&CudaRig));
}

#[test]
fn groups_pass_the_cases_of_groups() {
    run(|| kvconform::run_groups(&CudaRig));
}

#[test]
fn every_call_that_the_driver_refuses_is_an_error_and_nothing_is_held() {
    let functions = [
        "cuCtxGetCurrent",
        "cuStreamCreate",
        "cuMemPoolCreate",
        "cuMemPoolSetAttribute",
        "cuMemAllocFromPoolAsync",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuMemcpyAsync",
        "cuMemcpyHtoDAsync",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuStreamWaitEvent",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemGetAllocationGranularity",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuMemcpyPeerAsync",
        "cuDeviceCanAccessPeer",
        "cuCtxEnablePeerAccess",
    ];
    let failures = [(1, INVALID_VALUE), (2, INVALID_VALUE), (4, INVALID_VALUE), (1, ILLEGAL_ADDRESS)];
    run(|| kvconform::refused_calls(&CudaRig, &functions, &failures, 51));
}

#[test]
fn every_call_of_nccl_that_is_refused_is_an_error_and_nothing_is_held() {
    let functions = [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommGetAsyncError",
        "ncclGroupStart",
        "ncclGroupEnd",
        "ncclBroadcast",
        "ncclAllGather",
        "ncclAllReduce",
        "ncclSend",
        "ncclRecv",
        "ncclCommFinalize",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ];
    run(|| kvconform::refused_group_calls(&CudaRig, &functions, SYSTEM_ERROR, 21));
}

#[test]
fn a_call_that_does_nothing_is_noticed() {
    let functions = [
        "cuStreamWaitEvent",
        "cuEventRecord",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemsetD8Async",
        "cuMemcpyAsync",
        "cuMemcpyHtoDAsync",
        "cuMemFreeAsync",
        "cuMemFreeHost",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemSetAccess",
        "cuEventDestroy",
        "cuMemRelease",
        "cuStreamDestroy",
    ];
    run(|| kvconform::silent_calls(&CudaRig, &functions));
}
