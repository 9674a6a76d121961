//! The dense steps on an Ascend NPU.

use kvbackend_ascend::AscendBackend;
use kvbackend_ascend::dense::{AscendDenseSteps, AscendWeight};

use super::device::device_dense;

device_dense! {
    /// The dense steps on an Ascend NPU, using CANN's operators.
    ///
    /// Only token IDs are uploaded, and only logits are read back (with routed experts, also their scores).
    /// Weights of all stored types are widened to f32 when they are loaded.
    AscendDense of "ascend": AscendBackend, AscendDenseSteps, AscendWeight, place: place
}

/// Uploads a weight to the device.
fn place(steps: &AscendDenseSteps, stored: &StoredWeight, _: WeightUse) -> Result<AscendWeight> {
    let shape = stored.shape();
    let rows = shape[..shape.len() - 1].iter().product();
    Ok(steps.weight(rows, stored.width(), &stored.to_f32())?)
}
