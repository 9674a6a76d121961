//! Weights in ggml's blocks, as candle reads them.

use std::borrow::Cow;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};

use super::{StoredType, StoredWeight};
use crate::error::{Error, Result};

/// Returns candle's name of a type in blocks.
pub(super) fn blocks_of(dtype: StoredType) -> Option<GgmlDType> {
    Some(match dtype {
        StoredType::F32 | StoredType::F16 | StoredType::BF16 => return None,
        StoredType::Q8_0 => GgmlDType::Q8_0,
        StoredType::Q4_0 => GgmlDType::Q4_0,
        StoredType::Q4_1 => GgmlDType::Q4_1,
        StoredType::Q5_0 => GgmlDType::Q5_0,
        StoredType::Q5_1 => GgmlDType::Q5_1,
        StoredType::Q2K => GgmlDType::Q2K,
        StoredType::Q3K => GgmlDType::Q3K,
        StoredType::Q4K => GgmlDType::Q4K,
        StoredType::Q5K => GgmlDType::Q5K,
        StoredType::Q6K => GgmlDType::Q6K,
    })
}

/// Returns the blocks of a weight as they are stored.
pub(super) fn in_blocks(stored: &StoredWeight, dtype: GgmlDType) -> candle_core::Result<QTensor> {
    // candle reads the bytes as blocks, whose scales of two bytes must be aligned.
    let copy: Vec<u16>;
    let bytes = if bytemuck::try_cast_slice::<u8, u16>(stored.bytes()).is_ok() {
        stored.bytes()
    } else {
        copy = bytemuck::pod_collect_to_vec(stored.bytes());
        bytemuck::cast_slice(&copy)
    };
    QTensor::new(QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)?, stored.shape())
}

/// Returns the elements of a weight in blocks.
pub(super) fn widened(stored: &StoredWeight) -> Result<Vec<f32>> {
    let Some(dtype) = blocks_of(stored.dtype()) else { return Ok(Vec::new()) };
    let values = || in_blocks(stored, dtype)?.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1();
    values().map_err(|source| Error::Dense { implementation: "host", source: Box::new(source) })
}
