//! The simulator's rules. The tests break each rule with calls that a backend could make, and check the
//! error.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::simulator::{EAGER, LAZY, Simulator, alone};

/// ACL's code for success.
const OK: i32 = 0;
/// ACL's code for an invalid argument.
const INVALID: i32 = 107_000;
/// ACL's code for a thread without a context.
const NO_CONTEXT: i32 = 107_002;
/// ACL's code for a call that is not allowed during a capture.
const CAPTURED: i32 = 107_027;
/// ACL's code for an invalidated capture.
const INVALIDATED: i32 = 507_903;
/// ACL's code for a lost device.
const LOST: i32 = 507_015;
/// The operators' code for an invalid argument.
const OPERATOR_REFUSED: i32 = 161_002;

const UP: u32 = 1;
const FLOAT: i32 = 0;
const INT32: i32 = 3;
const FORMAT_ND: i32 = 2;

type Pointer = *mut c_void;

/// Makes ACL calls from one thread that has set a device.
struct Caller<'a> {
    simulator: &'a Simulator,
    device: i32,
}

/// Calls a simulator function by its name.
macro_rules! call {
    ($caller:expr, $name:literal, ($($argument:expr => $type:ty),*)) => {{
        let entry = $caller.simulator.entry::<unsafe extern "C" fn($($type),*) -> i32>($name);
        // SAFETY: the function has arguments of these types; the simulator checks the memory that they point
        // to.
        unsafe { entry($($argument),*) }
    }};
}

impl<'a> Caller<'a> {
    fn new(simulator: &'a Simulator, device: usize) -> Self {
        let caller = Self { simulator, device: device as i32 };
        call!(caller, "aclInit", (std::ptr::null() => *const i8));
        assert_eq!(call!(caller, "aclrtSetDevice", (caller.device => i32)), OK);
        caller
    }

    fn made(&self, name: &str) -> Pointer {
        let mut made = null_mut();
        let code = match name {
            "stream" => {
                call!(self, "aclrtCreateStreamWithConfig", (&raw mut made => *mut Pointer, 0 => u32, 0 => u32))
            }
            "event" => {
                call!(self, "aclrtCreateEventExWithFlag", (&raw mut made => *mut Pointer, 9 => u32))
            }
            "memory" => {
                call!(self, "aclrtMalloc", (&raw mut made => *mut Pointer, 4096 => usize, 0 => u32))
            }
            _ => call!(self, "aclrtMallocHost", (&raw mut made => *mut Pointer, 4096 => usize)),
        };
        assert_eq!(code, OK, "{name}");
        made
    }

    fn copy_up(&self, to: Pointer, from: Pointer, stream: Pointer) -> i32 {
        call!(self, "aclrtMemcpyAsync", (to => Pointer, 64 => usize, from => Pointer, 64 => usize, UP => u32, stream => Pointer))
    }

    fn synchronize(&self, stream: Pointer) -> i32 {
        call!(self, "aclrtSynchronizeStream", (stream => Pointer))
    }

    fn tensor(&self, at: Pointer, dtype: i32, dims: &[i64]) -> Pointer {
        type Make = unsafe extern "C" fn(
            *const i64,
            u64,
            i32,
            *const i64,
            i64,
            i32,
            *const i64,
            u64,
            Pointer,
        ) -> Pointer;
        let mut strides = vec![1; dims.len()];
        for axis in (1..dims.len()).rev() {
            strides[axis - 1] = strides[axis] * dims[axis];
        }
        let (rank, storage) = (dims.len() as u64, [dims.iter().product::<i64>()]);
        let make = self.simulator.entry::<Make>("aclCreateTensor");
        // SAFETY: the lists have the given lengths.
        unsafe { make(dims.as_ptr(), rank, dtype, strides.as_ptr(), 0, FORMAT_ND, storage.as_ptr(), 1, at) }
    }

    /// Runs the first phase of an operator with one operand. Returns the error code, the size of its
    /// workspace in bytes, and the executor.
    fn exp(&self, x: Pointer, out: Pointer) -> (i32, u64, Pointer) {
        let (mut bytes, mut executor) = (0, null_mut());
        let code = call!(self, "aclnnExpGetWorkspaceSize", (x => Pointer, out => Pointer, &raw mut bytes => *mut u64, &raw mut executor => *mut Pointer));
        (code, bytes, executor)
    }

    fn run(&self, workspace: Pointer, bytes: u64, executor: Pointer, stream: Pointer) -> i32 {
        call!(self, "aclnnExp", (workspace => Pointer, bytes => u64, executor => Pointer, stream => Pointer))
    }

    fn end(self) {
        assert_eq!(call!(self, "aclrtResetDevice", (self.device => i32)), OK);
    }
}

#[test]
fn memory_has_a_size_and_is_freed_once() {
    let Some((simulator, _alone)) = alone() else { return };
    let caller = Caller::new(simulator, EAGER);
    let mut at = null_mut();
    assert_eq!(call!(caller, "aclrtMalloc", (&raw mut at => *mut Pointer, 0 => usize, 0 => u32)), INVALID);
    let at = caller.made("memory");
    assert_eq!(call!(caller, "aclrtFree", (at => Pointer)), OK);
    assert_eq!(call!(caller, "aclrtFree", (at => Pointer)), INVALID, "twice");
    assert_eq!(call!(caller, "aclrtFree", (null_mut() => Pointer)), INVALID, "nothing");
    caller.end();
}

#[test]
fn a_thread_without_a_device_gets_an_error() {
    let Some((simulator, _alone)) = alone() else { return };
    let caller = Caller::new(simulator, EAGER);
    let code = std::thread::scope(|scope| {
        let on_another = || {
            let caller = Caller { simulator, device: 0 };
            let mut at = null_mut();
            call!(caller, "aclrtMalloc", (&raw mut at => *mut Pointer, 64 => usize, 0 => u32))
        };
        scope.spawn(on_another).join().unwrap()
    });
    assert_eq!(code, NO_CONTEXT);
    caller.end();
}

#[test]
fn asynchronous_copies_take_pinned_memory_only() {
    let Some((simulator, _alone)) = alone() else { return };
    let caller = Caller::new(simulator, EAGER);
    let (stream, memory, pinned) = (caller.made("stream"), caller.made("memory"), caller.made("pinned"));
    let mut pageable = [0u8; 64];
    assert_eq!(caller.copy_up(memory, pageable.as_mut_ptr().cast(), stream), INVALID);
    assert_eq!(caller.copy_up(memory, pinned, stream), OK);
    assert_eq!(caller.synchronize(stream), OK);
    assert_eq!(call!(caller, "aclrtDestroyStream", (stream => Pointer)), OK);
    assert_eq!(call!(caller, "aclrtFree", (memory => Pointer)), OK);
    assert_eq!(call!(caller, "aclrtFreeHost", (pinned => Pointer)), OK);
    caller.end();
}

#[test]
fn memory_is_checked_when_work_runs_and_a_wait_reports_the_fault() {
    let Some((simulator, _alone)) = alone() else { return };
    let caller = Caller::new(simulator, LAZY);
    let (stream, memory, pinned) = (caller.made("stream"), caller.made("memory"), caller.made("pinned"));
    assert_eq!(caller.copy_up(memory, pinned, stream), OK);
    assert_eq!(call!(caller, "aclrtDestroyStream", (stream => Pointer)), INVALID, "its work is not done");
    assert_eq!(call!(caller, "aclrtFree", (memory => Pointer)), OK, "a free waits for nothing");
    assert_eq!(caller.synchronize(stream), LOST, "the copy reaches freed memory");
    assert_eq!(caller.copy_up(memory, pinned, stream), LOST, "the device stays lost");
    assert_eq!(call!(caller, "aclrtDestroyStream", (stream => Pointer)), OK);
    assert_eq!(call!(caller, "aclrtFreeHost", (pinned => Pointer)), OK);
    caller.end();
}

#[test]
fn streams_that_touch_the_same_bytes_need_an_order() {
    let Some((simulator, _alone)) = alone() else { return };
    for ordered in [true, false] {
        let caller = Caller::new(simulator, LAZY);
        let streams = [caller.made("stream"), caller.made("stream")];
        let (memory, pinned, event) = (caller.made("memory"), caller.made("pinned"), caller.made("event"));
        assert_eq!(caller.copy_up(memory, pinned, streams[0]), OK);
        if ordered {
            assert_eq!(call!(caller, "aclrtRecordEvent", (event => Pointer, streams[0] => Pointer)), OK);
            assert_eq!(call!(caller, "aclrtStreamWaitEvent", (streams[1] => Pointer, event => Pointer)), OK);
        }
        assert_eq!(caller.copy_up(memory, pinned, streams[1]), OK);
        let waits = [caller.synchronize(streams[1]), caller.synchronize(streams[0])];
        assert_eq!(waits, if ordered { [OK, OK] } else { [OK, LOST] });
        assert_eq!(call!(caller, "aclrtDestroyEvent", (event => Pointer)), OK);
        for stream in streams {
            assert_eq!(call!(caller, "aclrtDestroyStream", (stream => Pointer)), OK);
        }
        assert_eq!(call!(caller, "aclrtFree", (memory => Pointer)), OK);
        assert_eq!(call!(caller, "aclrtFreeHost", (pinned => Pointer)), OK);
        caller.end();
    }
}

#[test]
fn operators_refuse_wrong_operands_and_executors_run_once() {
    let Some((simulator, _alone)) = alone() else { return };
    let caller = Caller::new(simulator, EAGER);
    let (stream, memory, workspace) = (caller.made("stream"), caller.made("memory"), caller.made("memory"));
    let at = |bytes: usize| memory.wrapping_byte_add(bytes);
    let refused = |x: Pointer, out: Pointer| assert_eq!(caller.exp(x, out).0, OPERATOR_REFUSED);
    let x = caller.tensor(at(0), FLOAT, &[4, 8]);
    let out = caller.tensor(at(1024), FLOAT, &[4, 8]);
    let others = [
        caller.tensor(at(1028), FLOAT, &[4, 8]),
        caller.tensor(at(1024), FLOAT, &[8, 4]),
        caller.tensor(at(1024), INT32, &[4, 8]),
        caller.tensor(at(64), FLOAT, &[4, 8]),
    ];
    // An unaligned address, a different shape, a different type, and a result that overlaps the operand.
    for other in others {
        refused(x, other);
    }
    let (code, bytes, executor) = caller.exp(x, out);
    assert_eq!((code, bytes > 0), (OK, true));
    assert_eq!(caller.run(workspace, bytes - 1, executor, stream), OPERATOR_REFUSED, "a small workspace");
    let (_, bytes, executor) = caller.exp(x, out);
    assert_eq!(caller.run(workspace, bytes, executor, stream), OK);
    assert_eq!(caller.run(workspace, bytes, executor, stream), OPERATOR_REFUSED, "twice");
    let (_, bytes, executor) = caller.exp(x, out);
    assert_eq!(call!(caller, "aclDestroyTensor", (out => Pointer)), OK);
    assert_eq!(caller.run(workspace, bytes, executor, stream), OPERATOR_REFUSED, "a tensor that is gone");
    assert_eq!(caller.synchronize(stream), OK);
    for tensor in others.into_iter().chain([x]) {
        assert_eq!(call!(caller, "aclDestroyTensor", (tensor => Pointer)), OK);
    }
    assert_eq!(call!(caller, "aclrtDestroyStream", (stream => Pointer)), OK);
    for memory in [memory, workspace] {
        assert_eq!(call!(caller, "aclrtFree", (memory => Pointer)), OK);
    }
    caller.end();
}

#[test]
fn captures_run_nothing_and_break_if_the_host_waits() {
    let Some((simulator, _alone)) = alone() else { return };
    let caller = Caller::new(simulator, EAGER);
    let (stream, memory, pinned) = (caller.made("stream"), caller.made("memory"), caller.made("pinned"));
    let (mut graph, mut none) = (null_mut(), null_mut());
    let begin = || call!(caller, "aclmdlRICaptureBegin", (stream => Pointer, 2 => u32));
    let end = |to: &mut Pointer| call!(caller, "aclmdlRICaptureEnd", (stream => Pointer, to => *mut Pointer));
    assert_eq!(begin(), OK);
    assert_eq!(caller.synchronize(stream), CAPTURED);
    assert_eq!(end(&mut none), INVALIDATED, "a capture that a wait has broken");
    assert_eq!(begin(), OK);
    assert_eq!(caller.copy_up(memory, pinned, stream), OK);
    assert_eq!(end(&mut graph), OK);
    assert_eq!(call!(caller, "aclrtFree", (memory => Pointer)), OK, "the copy has not run");
    assert_eq!(caller.synchronize(stream), OK);
    assert_eq!(call!(caller, "aclmdlRIExecuteAsync", (graph => Pointer, stream => Pointer)), OK);
    assert_eq!(caller.synchronize(stream), LOST, "now it has");
    assert_eq!(call!(caller, "aclmdlRIDestroy", (graph => Pointer)), OK);
    assert_eq!(call!(caller, "aclrtDestroyStream", (stream => Pointer)), OK);
    assert_eq!(call!(caller, "aclrtFreeHost", (pinned => Pointer)), OK);
    caller.end();
}
