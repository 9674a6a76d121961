//! The dense steps on an NVIDIA GPU.

use kvbackend_cuda::CudaBackend;
use kvbackend_cuda::dense::{CudaSteps, CudaWeight, StoredKind};

use super::StoredType;
use super::device::device_dense;

device_dense! {
    /// The dense steps on an NVIDIA GPU.
    ///
    /// Only token IDs are uploaded, and only logits are read back (with routed experts, also their scores).
    /// Weights keep their stored type, and matrix products have f32 precision. Products with many rows run on
    /// cuBLAS.
    CudaDense of "cuda": CudaBackend, CudaSteps, CudaWeight, place: place
}

/// Uploads a weight to the device.
fn place(steps: &CudaSteps, stored: &StoredWeight, purpose: WeightUse) -> Result<CudaWeight> {
    let (kind, bytes) = held_as(stored, purpose)?;
    let shape = stored.shape();
    let rows = shape[..shape.len() - 1].iter().product();
    Ok(steps.weight(kind, rows, stored.width(), &bytes)?)
}

/// Returns the type in which the device stores a weight, and the weight's bytes in this type.
fn held_as(stored: &StoredWeight, purpose: WeightUse) -> Result<(StoredKind, Vec<u8>)> {
    let in_f32 = || Ok((StoredKind::F32, bytemuck::cast_slice(&stored.to_f32()).to_vec()));
    let own = match stored.dtype() {
        StoredType::F32 => StoredKind::F32,
        StoredType::F16 => StoredKind::F16,
        StoredType::BF16 => StoredKind::BF16,
        StoredType::Q8_0 => StoredKind::Q8_0,
        StoredType::Q4K => StoredKind::Q4K,
        // No kernel multiplies blocks of other types.
        _ => return in_f32(),
    };
    match purpose {
        WeightUse::Projection(WeightFormat::Q8) if !stored.dtype().is_blocks() => match stored.to_q8_0() {
            Some(blocks) => Ok((StoredKind::Q8_0, blocks)),
            None => Ok((own, stored.bytes().to_vec())),
        },
        WeightUse::Projection(WeightFormat::F32) if stored.dtype().is_blocks() => in_f32(),
        WeightUse::Table | WeightUse::Projection(_) => Ok((own, stored.bytes().to_vec())),
        _ => in_f32(),
    }
}
