//! Products of queries with keys on the host, for those who look at attention instead of attending.

use candle_core::{Device, Tensor};

use crate::error::{Error, Result};

/// Returns the products of queries `[rows, heads, dim]` and keys `[tokens, kv_heads, dim]`, as
/// `[kv_heads, rows × group, tokens]`, where a group is the heads of a key head.
///
/// # Errors
/// Returns [`Error::Dense`] if the lengths do not fit the extents.
pub fn products(
    q: &[f32],
    k: &[f32],
    (rows, heads, kv_heads, tokens): (usize, usize, usize, usize),
) -> Result<Vec<f32>> {
    let (dim, group) = (q.len() / (rows * heads).max(1), heads / kv_heads.max(1));
    let multiply = || -> candle_core::Result<Vec<f32>> {
        let q = Tensor::from_slice(q, (rows, kv_heads, group, dim), &Device::Cpu)?;
        let q = q.permute((1, 0, 2, 3))?.reshape((kv_heads, rows * group, dim))?;
        let k = Tensor::from_slice(k, (tokens, kv_heads, dim), &Device::Cpu)?;
        q.matmul(&k.permute((1, 2, 0))?.contiguous()?)?.flatten_all()?.to_vec1()
    };
    multiply().map_err(|source| Error::Dense { implementation: "host", source: Box::new(source) })
}
