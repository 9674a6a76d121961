//! CANN's libraries: the folders to search for them, and the functions that they lack.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kvcore::Result;

use crate::bindings::{Acl, Base, Operators, types as sys};
use crate::errors::no_device;

/// Environment variable for the folder that contains the libraries. It takes precedence over all other
/// locations.
const FOLDER: &str = "KV_ASCEND_LIB_DIR";

/// Environment variables for CANN's toolkit folder, in order of precedence.
const TOOLKITS: [&str; 2] = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"];

/// The part of the backend that calls an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// Contract operations on dense caches. These operators are required.
    Operations,
    /// Int8 caches.
    Int8Caches,
    /// The dense steps of a model.
    DenseSteps,
    /// Decode attention in one fused operator.
    FusedAttention,
    /// Writes of keys and values to paged caches, in one fused operator.
    FusedScatter,
}

impl std::fmt::Display for Serves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Operations => "all operations",
            Self::Int8Caches => "int8 caches",
            Self::DenseSteps => "a model's dense steps",
            Self::FusedAttention => "decode attention in one operator",
            Self::FusedScatter => "writes to caches in one operator",
        })
    }
}

/// The libraries, loaded once per process.
pub(crate) struct Library {
    pub(crate) acl: Acl,
    pub(crate) base: Base,
    pub(crate) operators: Operators,
    /// Version of ACL's interface: major, minor, patch.
    pub(crate) version: (i32, i32, i32),
    /// The parts of the backend whose fused operators the libraries provide.
    pub(crate) fused: Vec<Serves>,
}

/// Returns the libraries. The first call loads them and starts ACL.
///
/// # Errors
/// Returns [`kvcore::Error::NoDevice`] if a library is missing or lacks a required function, or if ACL does
/// not start.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(Library::load).as_ref().map_err(|reason| no_device(reason.clone()))
}

/// Returns the paths to try for a library, in order.
fn files(name: &str) -> Vec<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return vec![Path::new(&folder).join(name)];
    }
    let toolkits = TOOLKITS.iter().filter_map(std::env::var_os);
    toolkits.map(|home| Path::new(&home).join("lib64").join(name)).chain([name.into()]).collect()
}

/// Opens a library from the first path at which it can be loaded.
pub(crate) fn open(name: &str) -> std::result::Result<libloading::Library, String> {
    let mut tried = Vec::new();
    for file in files(name) {
        // SAFETY: loading a library runs its initialisers, which for CANN have no effect on this program.
        match unsafe { libloading::Library::new(&file) } {
            Ok(library) => return Ok(library),
            Err(error) => tried.push(format!("{}: {error}", file.display())),
        }
    }
    Err(format!(
        "CANN's {name} cannot be loaded; install CANN 8.0 or later and the NPU's driver, and run CANN's set_env.sh, or \
         set {FOLDER} to the folder with its libraries (tried {})",
        tried.join("; ")
    ))
}

/// Returns the names of a table's functions that are missing.
macro_rules! missing {
    ($table:expr, $($function:ident),* $(,)?) => {
        [$((stringify!($function), $table.$function.is_ok())),*]
            .into_iter()
            .filter_map(|(name, present)| (!present).then_some(name))
            .collect::<Vec<_>>()
    };
}
pub(crate) use missing;

impl Library {
    /// Frees the executor of an operator whose second phase will not run. If CANN has no call for that, a few
    /// bytes of host memory leak.
    pub(crate) fn discard(&self, executor: *mut sys::aclOpExecutor) {
        if !missing!(self.base, aclSetAclOpExecutorRepeatable, aclDestroyAclOpExecutor).is_empty() {
            return;
        }
        // SAFETY: the executor comes from a first phase whose second phase never runs, and the caller no
        // longer uses it.
        unsafe {
            if self.base.aclSetAclOpExecutorRepeatable(executor) == 0 {
                self.base.aclDestroyAclOpExecutor(executor);
            }
        }
    }

    fn load() -> std::result::Result<Self, String> {
        // SAFETY: the functions have the types that `ascend.h` declares, which `cargo xtask ascend-headers`
        // compares with CANN's headers.
        let mut library = unsafe {
            Self {
                acl: Acl::from_library(open("libascendcl.so")?),
                base: Base::from_library(open("libnnopbase.so")?),
                operators: Operators::from_library(open("libopapi.so")?),
                version: (0, 0, 0),
                fused: Vec::new(),
            }
        };
        let missing = library.missing();
        if !missing.is_empty() {
            return Err(format!(
                "CANN lacks {}; CANN 8.0 and later have them in libascendcl.so, libnnopbase.so and libopapi.so",
                missing.join(", ")
            ));
        }
        let lists = missing!(library.base, aclCreateTensorList, aclDestroyTensorList).is_empty();
        let present = |&part: &Serves| library.lacks_for(part).is_empty();
        let fused = [Serves::FusedAttention, Serves::FusedScatter].into_iter().filter(present);
        library.fused = fused.filter(|&part| lists || part == Serves::FusedScatter).collect();
        library.start()?;
        Ok(library)
    }

    /// Returns the required functions that the libraries lack.
    fn missing(&self) -> Vec<&'static str> {
        let mut names = missing!(
            self.acl,
            aclInit,
            aclGetRecentErrMsg,
            aclrtGetSocName,
            aclrtGetVersion,
            aclrtGetDeviceCount,
            aclrtSetDevice,
            aclrtResetDevice,
            aclrtGetMemInfo,
            aclrtGetCurrentContext,
            aclrtSetCurrentContext,
            aclrtCreateStreamWithConfig,
            aclrtDestroyStream,
            aclrtSynchronizeStream,
            aclrtStreamWaitEvent,
            aclrtCreateEventExWithFlag,
            aclrtDestroyEvent,
            aclrtRecordEvent,
            aclrtQueryEventStatus,
            aclrtSynchronizeEvent,
            aclrtMalloc,
            aclrtFree,
            aclrtMallocHost,
            aclrtFreeHost,
            aclrtMemcpy,
            aclrtMemcpyAsync,
            aclrtMemsetAsync,
        );
        names.extend(missing!(
            self.base,
            aclCreateTensor,
            aclDestroyTensor,
            aclCreateScalar,
            aclDestroyScalar,
            aclCreateIntArray,
            aclDestroyIntArray,
        ));
        let operators = self.operators();
        names.extend(operators.into_iter().filter_map(|(name, serves, present)| {
            (serves == Serves::Operations && !present).then_some(name)
        }));
        names
    }

    /// Returns each operator with the part of the backend that calls it, and whether the library has the
    /// operator.
    pub(crate) fn operators(&self) -> Vec<(&'static str, Serves, bool)> {
        macro_rules! operators {
            ($($operator:ident, $phase:ident, $serves:ident;)*) => {
                vec![$((
                    stringify!($operator),
                    Serves::$serves,
                    self.operators.$operator.is_ok() && self.operators.$phase.is_ok(),
                )),*]
            };
        }
        operators! {
            aclnnInplaceIndexCopy, aclnnInplaceIndexCopyGetWorkspaceSize, Operations;
            aclnnIndexSelect, aclnnIndexSelectGetWorkspaceSize, Operations;
            aclnnInplaceCopy, aclnnInplaceCopyGetWorkspaceSize, Operations;
            aclnnCast, aclnnCastGetWorkspaceSize, Operations;
            aclnnAdd, aclnnAddGetWorkspaceSize, Operations;
            aclnnSub, aclnnSubGetWorkspaceSize, Operations;
            aclnnMul, aclnnMulGetWorkspaceSize, Operations;
            aclnnDiv, aclnnDivGetWorkspaceSize, Operations;
            aclnnMuls, aclnnMulsGetWorkspaceSize, Operations;
            aclnnExp, aclnnExpGetWorkspaceSize, Operations;
            aclnnLog, aclnnLogGetWorkspaceSize, Operations;
            aclnnTanh, aclnnTanhGetWorkspaceSize, Operations;
            aclnnMaximum, aclnnMaximumGetWorkspaceSize, Operations;
            aclnnAmax, aclnnAmaxGetWorkspaceSize, Operations;
            aclnnReduceSum, aclnnReduceSumGetWorkspaceSize, Operations;
            aclnnBatchMatMul, aclnnBatchMatMulGetWorkspaceSize, Operations;
            aclnnRound, aclnnRoundGetWorkspaceSize, Int8Caches;
            aclnnClamp, aclnnClampGetWorkspaceSize, Int8Caches;
            aclnnMatmul, aclnnMatmulGetWorkspaceSize, DenseSteps;
            aclnnRmsNorm, aclnnRmsNormGetWorkspaceSize, DenseSteps;
            aclnnSilu, aclnnSiluGetWorkspaceSize, DenseSteps;
            aclnnFusedInferAttentionScoreV2, aclnnFusedInferAttentionScoreV2GetWorkspaceSize, FusedAttention;
            aclnnScatterPaKvCache, aclnnScatterPaKvCacheGetWorkspaceSize, FusedScatter;
        }
    }

    /// Returns whether the libraries can capture graphs.
    pub(crate) fn captures(&self) -> bool {
        missing!(self.acl, aclmdlRICaptureBegin, aclmdlRICaptureEnd, aclmdlRIExecuteAsync, aclmdlRIDestroy)
            .is_empty()
    }

    /// Returns the operators that a part of the backend needs and the library lacks.
    pub(crate) fn lacks_for(&self, part: Serves) -> Vec<&'static str> {
        let operators = self.operators().into_iter();
        operators.filter_map(|(name, serves, present)| (serves == part && !present).then_some(name)).collect()
    }

    /// Starts ACL, or does nothing if another part of the program has already started it.
    fn start(&mut self) -> std::result::Result<(), String> {
        // SAFETY: a null path selects the default configuration.
        let code = unsafe { self.acl.aclInit(std::ptr::null()) };
        match code as u32 {
            sys::ACL_SUCCESS | sys::ACL_ERROR_REPEAT_INITIALIZE => {}
            sys::ACL_ERROR_COMPILING_STUB_MODE => {
                return Err(
                    "the library found is a stub for linking only; put the folder with the driver's libraries before it \
                            in LD_LIBRARY_PATH"
                        .to_owned(),
                );
            }
            _ => return Err(format!("ACL cannot start: {}", self.text(code))),
        }
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: all three pointers are valid for writes.
        unsafe { self.acl.aclrtGetVersion(&raw mut major, &raw mut minor, &raw mut patch) };
        self.version = (major, minor, patch);
        Ok(())
    }

    /// Formats an error code with ACL's message.
    pub(crate) fn text(&self, code: i32) -> String {
        // SAFETY: the message stays valid until this thread's next call into the library.
        let message = unsafe {
            let message = self.acl.aclGetRecentErrMsg();
            (!message.is_null()).then(|| CStr::from_ptr(message).to_string_lossy().trim().to_owned())
        };
        match message.filter(|message| !message.is_empty()) {
            Some(message) => format!("error {code}: {message}"),
            None => format!("error {code}"),
        }
    }

    /// Returns the name of the NPU's chip.
    pub(crate) fn processor(&self) -> String {
        // SAFETY: the string belongs to the library and is never freed.
        unsafe {
            let name = self.acl.aclrtGetSocName();
            if name.is_null() {
                "Ascend".to_owned()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
        }
    }
}
