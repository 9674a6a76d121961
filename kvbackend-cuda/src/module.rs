//! Kernels by name, and the PTX modules that contain them. A module is loaded when one of its kernels is used
//! for the first time.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::CString;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction, CUmodule};
use kvcore::{Error, Result};
use parking_lot::Mutex;

use crate::compile;
use crate::driver::{self, NAME};
use crate::facts::DeviceFacts;
use crate::options::KernelCode;

/// A compiled file from `kernels/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Module {
    /// Bit-for-bit copies of rows.
    Copy,
    /// Copies that convert, rotate or scale rows.
    Convert,
    /// A model's dense steps other than matrix products.
    Dense,
    /// Matrix products with few rows.
    Skinny,
    /// Attention over bf16 pools.
    AttendBf16,
    /// Attention over bf16 latents.
    AttendBf16Latent,
    /// Attention over f16 pools.
    AttendF16,
    /// Attention over f16 latents.
    AttendF16Latent,
    /// Attention over pools of int8, int4 or fp8 codes.
    AttendCodes,
    /// Attention over latents stored as int8, int4 or fp8 codes.
    AttendCodesLatent,
    /// Attention over any pool, without tensor cores.
    AttendPlain,
    /// The merge of attention's partial results.
    AttendMerge,
    /// The attention mass of tokens: their softmax weights, summed over rows and heads.
    AttendMass,
}

impl Module {
    /// Returns the committed PTX, compiled from the source by `cargo xtask cuda-ptx`.
    const fn ptx(self) -> &'static str {
        match self {
            Self::Copy => include_str!("../ptx/copy.ptx"),
            Self::Convert => include_str!("../ptx/convert.ptx"),
            Self::Dense => include_str!("../ptx/dense.ptx"),
            Self::Skinny => include_str!("../ptx/skinny.ptx"),
            Self::AttendBf16 => include_str!("../ptx/attend_bf16.ptx"),
            Self::AttendBf16Latent => include_str!("../ptx/attend_bf16_latent.ptx"),
            Self::AttendF16 => include_str!("../ptx/attend_f16.ptx"),
            Self::AttendF16Latent => include_str!("../ptx/attend_f16_latent.ptx"),
            Self::AttendCodes => include_str!("../ptx/attend_codes.ptx"),
            Self::AttendCodesLatent => include_str!("../ptx/attend_codes_latent.ptx"),
            Self::AttendPlain => include_str!("../ptx/attend_plain.ptx"),
            Self::AttendMerge => include_str!("../ptx/attend_merge.ptx"),
            Self::AttendMass => include_str!("../ptx/attend_mass.ptx"),
        }
    }

    /// Returns the module's source.
    const fn source(self) -> &'static str {
        match self {
            Self::Copy => include_str!("../kernels/copy.cu"),
            Self::Convert => include_str!("../kernels/convert.cu"),
            Self::Dense => include_str!("../kernels/dense.cu"),
            Self::Skinny => include_str!("../kernels/skinny.cu"),
            Self::AttendBf16 => include_str!("../kernels/attend_bf16.cu"),
            Self::AttendBf16Latent => include_str!("../kernels/attend_bf16_latent.cu"),
            Self::AttendF16 => include_str!("../kernels/attend_f16.cu"),
            Self::AttendF16Latent => include_str!("../kernels/attend_f16_latent.cu"),
            Self::AttendCodes => include_str!("../kernels/attend_codes.cu"),
            Self::AttendCodesLatent => include_str!("../kernels/attend_codes_latent.cu"),
            Self::AttendPlain => include_str!("../kernels/attend_plain.cu"),
            Self::AttendMerge => include_str!("../kernels/attend_merge.cu"),
            Self::AttendMass => include_str!("../kernels/attend_mass.cu"),
        }
    }
}

/// A kernel of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CudaKernel {
    pub(crate) module: Module,
    /// The name of the kernel's entry point in the PTX.
    pub(crate) name: &'static str,
    /// The maximum shared memory that a launch requests, in bytes.
    pub(crate) shared: u32,
}

/// The modules and kernels that a device has loaded.
pub(crate) struct Modules {
    code: KernelCode,
    loaded: Mutex<LoadedModules>,
}

#[derive(Default)]
struct LoadedModules {
    modules: HashMap<Module, CUmodule>,
    kernels: HashMap<CudaKernel, CUfunction>,
}

/// The shared memory, in bytes, that a block may use unless an attribute of its kernel raises this limit.
const PLAIN_SHARED: u32 = 48 << 10;

impl Modules {
    pub(crate) fn new(code: KernelCode) -> Self {
        Self { code, loaded: Mutex::default() }
    }

    /// Returns a module's PTX.
    fn ptx(&self, facts: &DeviceFacts, module: Module) -> Result<Cow<'static, str>> {
        match &self.code {
            KernelCode::Committed => Ok(module.ptx().into()),
            KernelCode::Compiled { keep_in } => {
                compile::ptx(module.source(), facts, keep_in.as_deref()).map(Cow::Owned)
            }
        }
    }

    /// Returns a kernel, which is loaded on first use. The device's context must be current.
    pub(crate) fn get(&self, facts: &DeviceFacts, kernel: CudaKernel) -> Result<CUfunction> {
        let mut loaded = self.loaded.lock();
        if let Some(&function) = loaded.kernels.get(&kernel) {
            return Ok(function);
        }
        if kernel.shared > facts.shared_memory {
            let what = format!(
                "kernel {}, whose blocks take {} bytes of shared memory: the device has {}",
                kernel.name, kernel.shared, facts.shared_memory
            );
            return Err(Error::Unsupported { backend: NAME, what });
        }
        let module = if let Some(&module) = loaded.modules.get(&kernel.module) {
            module
        } else {
            let text = self.ptx(facts, kernel.module)?;
            let text = CString::new(&*text).map_err(|_| no_text(kernel))?;
            // SAFETY: `text` is PTX that ends with a zero byte.
            let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
            let module = module.map_err(driver::refused)?;
            loaded.modules.insert(kernel.module, module);
            module
        };
        let name = CString::new(kernel.name).map_err(|_| no_text(kernel))?;
        // SAFETY: `module` is loaded and stays loaded until the device is dropped.
        let function = unsafe { result::module::get_function(module, name) }.map_err(driver::refused)?;
        if kernel.shared > PLAIN_SHARED {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: `function` was just loaded.
            unsafe { sys::cuFuncSetAttribute(function, attribute, kernel.shared as i32) }
                .result()
                .map_err(driver::refused)?;
        }
        loaded.kernels.insert(kernel, function);
        Ok(function)
    }

    /// Unloads all modules. The device's context must be current, and no kernel may be running.
    pub(crate) fn unload(&self) {
        let mut loaded = self.loaded.lock();
        loaded.kernels.clear();
        for (_, module) in loaded.modules.drain() {
            // SAFETY: `module` was loaded in this context, and its functions are no longer stored.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

fn no_text(kernel: CudaKernel) -> Error {
    Error::Device { backend: NAME, reason: format!("kernel {} contains a zero byte", kernel.name) }
}
