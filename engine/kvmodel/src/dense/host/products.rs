//! Dot products of queries with keys on the host, for inspecting attention rather than computing
//! it.

use kvbackend_cpu::dense::{Matrix, Products, StoredType};

use crate::error::Result;

/// Returns the dot products of queries `[rows, heads, dim]` and keys `[tokens, kv_heads, dim]`, as
/// `[kv_heads, rows × group, tokens]`. A group is the number of query heads per key head.
///
/// # Errors
/// Returns [`kvcore::Error::Mismatch`] if the length of the keys does not match the sizes.
pub(crate) fn products(
    q: &[f32],
    k: &[f32],
    (rows, heads, kv_heads, tokens): (usize, usize, usize, usize),
) -> Result<Vec<f32>> {
    let (dim, group) = (q.len() / (rows * heads).max(1), heads / kv_heads.max(1));
    let (expected, got) = (tokens * kv_heads * dim, k.len());
    if expected != got {
        return Err(kvcore::Error::mismatch("elements of keys", expected, got).into());
    }
    let (products, width) = (Products::new(), group * dim);
    let mut all = vec![0.0; kv_heads * rows * group * tokens];
    let (mut queries, mut keys) = (vec![0.0; rows * width], vec![0.0; tokens * dim]);
    for (head, product) in all.chunks_exact_mut((rows * group * tokens).max(1)).enumerate() {
        for (to, row) in queries.chunks_exact_mut(width.max(1)).zip(q.chunks_exact((heads * dim).max(1))) {
            to.copy_from_slice(&row[head * width..][..width]);
        }
        for (to, token) in keys.chunks_exact_mut(dim.max(1)).zip(k.chunks_exact((kv_heads * dim).max(1))) {
            to.copy_from_slice(&token[head * dim..][..dim]);
        }
        let keys = Matrix::new(StoredType::F32, tokens, dim, bytemuck::cast_slice(&keys))?;
        products.multiply(&queries, &keys, product)?;
    }
    Ok(all)
}
