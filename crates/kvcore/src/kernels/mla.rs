//! Multi-head latent attention over the cached latents themselves.

use super::{Attend, apart, computable, innermost_dense};
use crate::error::{Result, same};
use crate::tensor::TensorView;

/// Attention whose values are latents that are also part of the keys (DeepSeek's MLA).
///
/// The cache has one head: K holds the rotated part of the key (`k_dim` = `qk_rope_head_dim`), V the
/// latent (`v_dim` = `kv_lora_rank`). The caller absorbs the projections from and to the latent into
/// queries and output. For each row and head the logit of a token is
/// `scale * logit_scale * (q·k + q_latent·latent)`, and the output is the weighted sum of latents;
/// everything else is as in [`Attend`].
#[derive(Debug, Clone)]
pub struct AttendMla {
    /// The rotated part: `q` is `[rows, heads, qk_rope_head_dim]`, `out` `[rows, heads, kv_lora_rank]`.
    pub attend: Attend,
    /// The part of the queries that meets the latent, `[rows, heads, kv_lora_rank]`; never rotated.
    pub q_latent: TensorView,
}

impl AttendMla {
    /// Checks what [`Attend::check`] does, that the arena has one head, and the latent queries.
    ///
    /// # Errors
    /// As [`Attend::check`], for the latent queries too.
    pub fn check(&self) -> Result<()> {
        self.attend.check()?;
        let s = self.attend.arena.layout().shape();
        same("k_heads of a latent cache", 1, s.k_heads)?;
        same("v_heads of a latent cache", 1, s.v_heads)?;
        let (q, latent) = (self.attend.q.shape(), self.q_latent.shape());
        same("rank of latent queries [rows, heads, kv_lora_rank]", 3, latent.len())?;
        same("rows of latent queries", q[0], latent[0])?;
        same("heads of latent queries", q[1], latent[1])?;
        same("width of latent queries", s.v_dim, latent[2])?;
        computable("latent queries", &self.q_latent)?;
        innermost_dense("latent queries", &self.q_latent)?;
        self.attend.arena.check_apart("latent queries", &self.q_latent)?;
        let lse = self.attend.lse.as_ref();
        lse.map_or(Ok(()), |lse| apart("lse and latent queries", lse, &self.q_latent))
    }
}
