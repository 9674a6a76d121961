//! NCCL, loaded at run time: its entry points and its errors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use kvcore::{Error, Result};
use libloading::{Library, Symbol};

use crate::driver::{NAME, no_device};

/// The library's possible file names. NCCL's runtime packages and Python wheel install it only under the
/// first name.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest supported version. Earlier versions cannot abort or finalise a non-blocking communicator.
const OLDEST: c_int = 21_800;

/// An entry point's result code. It is a plain integer, because a later version may return codes that cudarc
/// does not list.
pub(super) type Code = c_int;

pub(super) const SUCCESS: Code = 0;
pub(super) const REMOTE_ERROR: Code = 6;
pub(super) const IN_PROGRESS: Code = 7;

/// Declares the entry points, each as a field with its type, and looks them up in the library by name.
macro_rules! entries {
    ($($field:ident: $name:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The entry points that the backend calls.
        pub(super) struct Nccl {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: Library,
        }

        impl Nccl {
            /// Looks up all entry points in the library.
            fn of(library: Library) -> std::result::Result<Self, String> {
                Ok(Self {
                    // SAFETY: these are the types that NCCL's header declares for the entry points.
                    $($field: unsafe { found(&library, $name) }?,)*
                    _library: library,
                })
            }
        }
    };
}

entries! {
    version: "ncclGetVersion" (*mut c_int) -> Code;
    error_string: "ncclGetErrorString" (Code) -> *const c_char;
    last_error: "ncclGetLastError" (ncclComm_t) -> *const c_char;
    unique_id: "ncclGetUniqueId" (*mut ncclUniqueId) -> Code;
    init_rank: "ncclCommInitRankConfig" (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;
    async_error: "ncclCommGetAsyncError" (ncclComm_t, *mut Code) -> Code;
    finalize: "ncclCommFinalize" (ncclComm_t) -> Code;
    destroy: "ncclCommDestroy" (ncclComm_t) -> Code;
    abort: "ncclCommAbort" (ncclComm_t) -> Code;
    group_start: "ncclGroupStart" () -> Code;
    group_end: "ncclGroupEnd" () -> Code;
    broadcast: "ncclBroadcast"
        (*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, CUstream) -> Code;
    all_gather: "ncclAllGather" (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, CUstream) -> Code;
    all_reduce: "ncclAllReduce"
        (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream) -> Code;
    send: "ncclSend" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, CUstream) -> Code;
    receive: "ncclRecv" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, CUstream) -> Code;
}

/// Looks up an entry point by name.
///
/// # Safety
/// `F` must be the type of the entry point.
unsafe fn found<F: Copy>(library: &Library, name: &str) -> std::result::Result<F, String> {
    // SAFETY: the caller guarantees that `F` is the entry point's type.
    let symbol: std::result::Result<Symbol<'_, F>, _> = unsafe { library.get(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| format!("the collectives library has no {name}; {UPDATE}"))
}

const UPDATE: &str = "update NCCL to 2.18 or later";

// Decision: docs/decisions/backend-cuda.md#nccl-is-loaded-by-the-file-name-that-packages-use
/// Returns NCCL, which is loaded on the first call.
///
/// # Errors
/// Returns [`Error::NoDevice`] if the library is missing or too old; the error explains what to install.
pub(super) fn library() -> Result<&'static Nccl> {
    static LIBRARY: OnceLock<std::result::Result<Nccl, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(|reason| no_device(reason.clone()))
}

fn load() -> std::result::Result<Nccl, String> {
    // SAFETY: loading a library runs its initialisers; NCCL's have no other effect.
    let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    let nccl = Nccl::of(library.ok_or_else(|| {
        "the collectives library (libnccl.so.2) was not found; install NCCL 2.18 or later (the package libnccl2, or \
         the wheel nvidia-nccl-cu13 or nvidia-nccl-cu12), or add its folder to LD_LIBRARY_PATH"
            .to_owned()
    })?)?;
    let mut version = 0;
    // SAFETY: `version` is valid for writes.
    let code = unsafe { (nccl.version)(&raw mut version) };
    if code != SUCCESS || version < OLDEST {
        let (major, minor) = (version / 10_000, version % 10_000 / 100);
        return Err(format!("the collectives library is NCCL {major}.{minor}, which is too old; {UPDATE}"));
    }
    Ok(nccl)
}

impl Nccl {
    /// Checks a call's result code. A call that continues in the background counts as successful.
    pub(super) fn check(&self, what: &str, comm: ncclComm_t, code: Code) -> Result<()> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            refused => Err(self.refused(what, comm, refused)),
        }
    }

    /// Returns the error for a result code, with NCCL's message for the code and NCCL's last warning.
    /// `comm` may be null.
    pub(super) fn refused(&self, what: &str, comm: ncclComm_t, code: Code) -> Error {
        // SAFETY: NCCL has a message for every code, and never frees it.
        let text = unsafe { text_of((self.error_string)(code)) };
        // SAFETY: `comm` is null or alive. The string is copied before this thread's next call can change it.
        let last = unsafe { text_of((self.last_error)(comm)) };
        let hint = match code {
            REMOTE_ERROR => {
                "; another rank has failed or left, or the network failed: stop the work on all ranks"
            }
            _ => "",
        };
        let reason = if last.is_empty() {
            format!("{what}: {text} (NCCL {code}){hint}")
        } else {
            format!("{what}: {text} (NCCL {code}): {last}{hint}")
        };
        Error::Device { backend: NAME, reason }
    }
}

/// Copies a string that belongs to NCCL.
///
/// # Safety
/// `text` must be null or a string that ends with a zero byte.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees the zero byte at the end.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}
