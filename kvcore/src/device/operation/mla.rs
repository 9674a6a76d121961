//! Multi-head latent attention (MLA) directly over the cached latents.

use super::entry::Storages;
use super::{Attend, apart, computable, innermost_dense};
use crate::base::{Result, same};
use crate::device::TensorView;

// Decision: docs/decisions/device.md#the-latent-of-mla-is-the-v-plane
/// Attention whose values are latents that are also part of the keys (DeepSeek's MLA).
///
/// The cache has one head: K holds the rotated part of the key (`k_dim` = `qk_rope_head_dim`), and V holds
/// the latent (`v_dim` = `kv_lora_rank`). The caller must absorb the projections to and from the latent space
/// into the queries and the output. For each row and head, the logit of a token is `scale * logit_scale *
/// (q·k + q_latent·latent)`, and the output is the weighted sum of the latents. Everything else is the same
/// as in [`Attend`].
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Attend, AttendMla, AttendRows, AttendWork, QueryRow};
/// use kvcore::{
///     Backend, BlockId, BlockOrder, DType, KeyForm, KvArena, KvLayout, KvShape, MemoryKind, Segment,
///     allocate_tensor,
/// };
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// // qk_rope_head_dim 64 and kv_lora_rank 512, 16 query heads
/// let shape = KvShape {
///     num_layers: 1, num_blocks: 2, block_size: 16, k_heads: 1, v_heads: 1, k_dim: 64, v_dim: 512,
///     format: DType::BF16.into(), order: BlockOrder::TokenMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let rows = |dim| allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[1, 16, dim]);
/// let segment = Segment::new([BlockId(0), BlockId(1)].into(), 20, 0, 0);
/// let attend = Attend {
///     arena, layer: 0, q: rows(64)?, rope: None, keys: KeyForm::Rotated,
///     work: Arc::new(AttendWork::new([QueryRow { logical: 19, position: 19 }], [AttendRows::new(0..1, [segment])])),
///     scale: 1.0 / 192f32.sqrt(), // the key width before absorption, 128 + 64
///     window: None, softcap: None, out: rows(512)?, lse: None,
/// };
/// stream.attend_mla(&AttendMla { attend, q_latent: rows(512)? })?;
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AttendMla {
    /// The attention arguments, with the rotated part of the queries: `q` is `[rows, heads,
    /// qk_rope_head_dim]`, and `out` is `[rows, heads, kv_lora_rank]`.
    pub attend: Attend,
    /// The part of the queries that is multiplied with the latents, `[rows, heads, kv_lora_rank]`. Never
    /// rotated.
    pub q_latent: TensorView,
}

impl AttendMla {
    /// Checks everything that [`Attend::check`] checks, and that the arena has one head and the latent
    /// queries are valid.
    ///
    /// # Errors
    /// Returns the errors of [`Attend::check`], which also apply to the latent queries.
    pub fn check(&self) -> Result<()> {
        check(&self.attend, &self.q_latent)
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        self.attend.storages(storages);
        storages.view(&self.q_latent);
    }

    /// Returns the total size, in bytes, of the cached latents and rotated keys that the entries attend to.
    pub fn bytes(&self) -> usize {
        self.attend.bytes()
    }
}

/// Checks an attention with the latent queries `q_latent`.
pub(super) fn check(attend: &Attend, q_latent: &TensorView) -> Result<()> {
    attend.check()?;
    let s = attend.arena.layout().shape();
    same("k_heads of a latent cache", 1, s.k_heads)?;
    same("v_heads of a latent cache", 1, s.v_heads)?;
    let (q, latent) = (attend.q.shape(), q_latent.shape());
    same("rank of latent queries [rows, heads, kv_lora_rank]", 3, latent.len())?;
    same("rows of latent queries", q[0], latent[0])?;
    same("heads of latent queries", q[1], latent[1])?;
    same("width of latent queries", s.v_dim, latent[2])?;
    computable("latent queries", q_latent)?;
    innermost_dense("latent queries", q_latent)?;
    attend.arena.check_apart("latent queries", q_latent)?;
    attend.lse.as_ref().map_or(Ok(()), |lse| apart("lse and latent queries", lse, q_latent))
}
