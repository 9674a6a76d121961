//! Capabilities: a backend may lack only optional kernels.

use kvcore::{DType, KvFormat, OPTIONAL, REQUIRED};

use crate::bench::{Bench, Outcome, ensure};

pub(super) fn no_required_kernel_or_type_is_missing(b: &Bench) -> Outcome {
    let capabilities = b.backend.capabilities();
    for kernel in REQUIRED {
        ensure(!capabilities.missing.contains(&kernel), || format!("{kernel} is listed as missing"))?;
    }
    for dtype in DType::COMPUTE {
        ensure(capabilities.accepts(dtype.into()), || format!("{dtype} is not listed"))?;
    }
    for kernel in &capabilities.missing {
        ensure(OPTIONAL.contains(kernel), || format!("{kernel} is no kernel"))?;
    }
    for format in &capabilities.formats {
        ensure(KvFormat::QUANTIZED.contains(format), || format!("{format} is no format"))?;
    }
    Ok(())
}
