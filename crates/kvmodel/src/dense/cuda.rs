//! The dense steps on an NVIDIA GPU.

use half::f16;
use kvbackend_cuda::CudaBackend;
use kvbackend_cuda::dense::{DenseSteps, DeviceWeight, StoredKind};

use super::StoredType;
use super::device::device_dense;

device_dense! {
    /// The dense steps on an NVIDIA GPU.
    ///
    /// Only token ids go up and logits come down (with routed experts, also their scores). Weights are held as they are
    /// stored; products have the precision of f32. Matrix products of many rows are cuBLAS's.
    CudaDense of "cuda": CudaBackend, DenseSteps, DeviceWeight, place: place
}

/// Puts a weight on the device.
fn place(steps: &DenseSteps, stored: &StoredWeight, purpose: WeightUse) -> Result<DeviceWeight> {
    let (kind, bytes) = held_as(stored, purpose)?;
    let shape = stored.shape();
    let rows = shape[..shape.len() - 1].iter().product();
    Ok(steps.weight(kind, rows, stored.width(), &bytes)?)
}

/// Returns the type under which the device holds a stored weight, and its bytes.
fn held_as(stored: &StoredWeight, purpose: WeightUse) -> Result<(StoredKind, Vec<u8>)> {
    let in_f32 = || Ok((StoredKind::F32, bytemuck::cast_slice(&stored.to_f32()?).to_vec()));
    let own = match stored.dtype() {
        StoredType::F32 => StoredKind::F32,
        StoredType::F16 => StoredKind::F16,
        StoredType::BF16 => StoredKind::BF16,
        StoredType::Q8_0 => StoredKind::Q8_0,
        StoredType::Q4K => StoredKind::Q4K,
        // No kernel multiplies other blocks as they are.
        _ => return in_f32(),
    };
    match purpose {
        WeightUse::Projection(WeightFormat::Q8)
            if !stored.dtype().is_blocks() && stored.width().is_multiple_of(BLOCK) =>
        {
            Ok((StoredKind::Q8_0, q8_0(&stored.to_f32()?)))
        }
        WeightUse::Projection(WeightFormat::F32) if stored.dtype().is_blocks() => in_f32(),
        WeightUse::Table | WeightUse::Projection(_) => Ok((own, stored.bytes().to_vec())),
        _ => in_f32(),
    }
}

/// Elements of a block of `Q8_0`.
const BLOCK: usize = 32;

/// Rounds numbers to blocks of `Q8_0`, as ggml does.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() / BLOCK * 34);
    for block in values.chunks_exact(BLOCK) {
        let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let step = most / 127.0;
        let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
        bytes.extend_from_slice(&f16::from_f32(step).to_le_bytes());
        bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8).cast_unsigned()));
    }
    bytes
}
