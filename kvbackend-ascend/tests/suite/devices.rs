//! The test cases for devices and groups that all backends share, on NPUs or on the simulator.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvbackend_ascend::{AscendBackend, AscendOptions, HcclCommunicator, HcclId};
use kvconform::devices::{
    DeviceRig, DriverDouble, DriverFault, GroupRig, Holdings, Queued, refused_calls, refused_group_calls,
    run_devices, run_groups, silent_calls,
};
use kvcore::{Backend, CopyTensor, DType, MemoryKind, Result, TensorView, allocate_tensor};

use crate::simulator::{Simulator, alone};

/// ACL's code for an invalid argument.
const INVALID_VALUE: i32 = 107_000;
/// ACL's code for exhausted device memory.
const OUT_OF_MEMORY: i32 = 207_001;
/// ACL's code for a lost device.
const LOST: i32 = 507_015;
/// HCCL's code for an internal failure.
const INTERNAL: i32 = 4;

/// Environment variable for the child process in which calls do nothing.
const SILENT: &str = "KV_ASCEND_TEST_SILENT";

/// NPUs, or the devices of the simulator.
struct Npus(Option<&'static Simulator>);

impl DriverDouble for Simulator {
    fn live(&self, device: usize) -> Holdings {
        let [bytes, pinned, objects] = Simulator::live(self, device).map(|n| n as usize);
        Holdings { bytes, pinned, objects }
    }

    fn queued(&self, device: usize) -> Queued {
        let trace = self.trace(device);
        let count = |kind: &str| trace.iter().filter(|line| line.split(' ').next() == Some(kind)).count();
        Queued {
            kernels: count("operator"),
            graphs: count("graph"),
            uploads: count("memcpy_h2d"),
            peer_copies: count("memcpy_d2d"),
        }
    }

    fn fail(&self, function: &str, after: usize, code: i32) {
        Simulator::fail(self, function, after as u64, code);
    }

    fn fault(&self, fault: DriverFault) -> (&'static str, i32) {
        match fault {
            DriverFault::DeviceMemory => ("aclrtMalloc", OUT_OF_MEMORY),
            DriverFault::PinnedMemory => ("aclrtMallocHost", OUT_OF_MEMORY),
            DriverFault::LostInWait => ("aclrtSynchronizeStream", LOST),
        }
    }

    fn ignore(&self, function: &str, on: bool) {
        Simulator::ignore(self, function, on);
    }

    fn limit(&self, device: usize, bytes: Option<usize>) {
        match bytes {
            Some(bytes) => Simulator::limit(self, device, bytes as u64),
            None => Simulator::reset(self),
        }
    }

    fn reset(&self) {
        Simulator::reset(self);
    }
}

impl DeviceRig for Npus {
    type Backend = AscendBackend;

    fn open(&self, device: usize) -> Result<Arc<AscendBackend>> {
        AscendBackend::with_options(&AscendOptions { device, plain: false })
    }

    fn double(&self) -> Option<&dyn DriverDouble> {
        self.0.map(|simulator| simulator as _)
    }

    fn copy_of_freed_memory(&self, backend: &Arc<AscendBackend>) -> Result<CopyTensor> {
        let owned = backend.allocate(MemoryKind::Device, 4096)?;
        // SAFETY: the memory is freed below on purpose: the device faults, but the process does not.
        let lent = unsafe { backend.lent(owned.address(), 4096, Arc::new(())) }?;
        drop(owned);
        let src = TensorView::new(Arc::new(lent), DType::U8, &[4096])?;
        Ok(CopyTensor {
            src,
            dst: allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[4096])?,
        })
    }
}

impl GroupRig for Npus {
    type Communicator = HcclCommunicator;
    type Id = HcclId;

    fn group(&self, backends: &[Arc<AscendBackend>], limit: Duration) -> Result<Vec<HcclCommunicator>> {
        HcclCommunicator::group(backends, limit)
    }

    fn id(&self, first: &Arc<AscendBackend>) -> Result<HcclId> {
        Ok(HcclId::from_bytes(*HcclId::new(first)?.as_bytes()))
    }

    fn join(
        &self,
        backend: &Arc<AscendBackend>,
        id: &HcclId,
        rank: usize,
        ranks: usize,
        limit: Duration,
    ) -> Result<HcclCommunicator> {
        HcclCommunicator::new(backend, id, rank, ranks, limit)
    }

    fn foreign(&self) -> Arc<dyn Backend> {
        kvbackend_cpu::CpuBackend::new()
    }

    fn shorten_patience(&self) {
        if let Some(simulator) = self.0 {
            simulator.patience(300);
        }
    }
}

/// Runs cases while no other test runs. They run on the simulator if it replaces CANN.
fn run(cases: impl FnOnce(&Npus) -> std::result::Result<(), kvconform::Failure>) {
    let alone = alone();
    if let Err(failure) = cases(&Npus(alone.as_ref().map(|(simulator, _)| *simulator))) {
        panic!("{failure}");
    }
}

#[test]
fn every_case_of_devices_holds() {
    run(run_devices);
}

#[test]
fn every_case_of_groups_holds() {
    run(run_groups);
}

#[test]
fn every_refused_call_is_an_error_and_nothing_is_held() {
    let functions = [
        "aclrtSetDevice",
        "aclrtSetCurrentContext",
        "aclrtCreateStreamWithConfig",
        "aclrtMalloc",
        "aclrtMallocHost",
        "aclrtMemsetAsync",
        "aclrtSynchronizeStream",
        "aclrtMemcpyAsync",
        "aclrtMemcpy",
        "aclrtCreateEventExWithFlag",
        "aclrtRecordEvent",
        "aclrtQueryEventStatus",
        "aclrtSynchronizeEvent",
        "aclrtStreamWaitEvent",
        "aclrtMemGetAllocationGranularity",
        "aclrtReserveMemAddress",
        "aclrtMallocPhysical",
        "aclrtMapMem",
        "aclCreateTensor",
        "aclCreateScalar",
        "aclCreateIntArray",
        "aclCreateTensorList",
        "aclnnScatterPaKvCacheGetWorkspaceSize",
        "aclnnScatterPaKvCache",
        "aclnnFusedInferAttentionScoreV2GetWorkspaceSize",
        "aclnnFusedInferAttentionScoreV2",
        "aclnnInplaceIndexCopyGetWorkspaceSize",
        "aclnnInplaceIndexCopy",
        "aclnnIndexSelectGetWorkspaceSize",
        "aclnnCastGetWorkspaceSize",
        "aclnnCast",
        "aclnnBatchMatMulGetWorkspaceSize",
        "aclnnExp",
    ];
    let codes = [(1, INVALID_VALUE), (2, INVALID_VALUE), (5, INVALID_VALUE), (1, LOST)];
    run(|npus| refused_calls(npus, &functions, &codes, 81));
}

#[test]
fn every_refused_call_of_a_group_is_an_error_and_nothing_is_held() {
    let functions = [
        "HcclCommInitAll",
        "HcclGetCommAsyncError",
        "HcclBroadcast",
        "HcclAllGather",
        "HcclAllReduce",
        "HcclBatchSendRecv",
        "aclrtStreamWaitEvent",
        "aclrtRecordEvent",
        "aclrtSynchronizeStreamWithTimeout",
    ];
    run(|npus| refused_group_calls(npus, &functions, INTERNAL, 16));
}

/// Runs in its own process, because a call that does nothing may leave a stream on the simulator's device.
/// That device then cannot be opened again after a fault.
#[test]
fn a_call_that_does_nothing_is_noticed() {
    if std::env::var_os(SILENT).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = "devices::a_call_that_does_nothing_is_noticed";
        let output = child.args([name, "--exact", "--nocapture"]).env(SILENT, "1").output().unwrap();
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        out.lines().filter(|line| line.starts_with("SKIPPED")).for_each(|line| println!("{line}"));
        assert!(output.status.success(), "{out}{err}");
        return;
    }
    let functions = [
        "aclrtStreamWaitEvent",
        "aclrtRecordEvent",
        "aclrtSynchronizeStream",
        "aclrtSynchronizeEvent",
        "aclrtMemsetAsync",
        "aclrtMemcpyAsync",
        "aclrtMemcpy",
        "aclrtFree",
        "aclrtFreeHost",
        "aclrtUnmapMem",
        "aclrtFreePhysical",
        "aclrtReleaseMemAddress",
        "aclrtDestroyEvent",
        "aclrtDestroyStream",
        "aclmdlRIExecuteAsync",
        "aclmdlRIDestroy",
        "aclDestroyTensor",
        "aclDestroyScalar",
        "aclDestroyIntArray",
        "aclDestroyTensorList",
        "aclnnScatterPaKvCache",
        "aclnnFusedInferAttentionScoreV2",
        "aclnnInplaceIndexCopy",
        "aclnnIndexSelect",
        "aclnnInplaceCopy",
        "aclnnCast",
        "aclnnBatchMatMul",
        "aclnnReduceSum",
    ];
    run(|npus| silent_calls(npus, &functions));
}
