//! The dense steps of a model: everything between token ids and logits except attention.
//!
//! A model holds its steps as `Arc<dyn Dense>`. [`HostDense`] computes them on the host. An implementation on
//! a device keeps weights and activations in the memory of the device: only token ids are uploaded, and only
//! logits are read back (with routed experts, also the scores of experts).
//!
//! ```text
//! ids ─► embed ─┬► rms_norm ─► project ─► Border::lend ─► TensorView ─► Scatter, Attend   (kvcore, on a Stream)
//!               │                                                              │
//!               └► add ◄─ project ◄──── Border::take ◄──── Border::output ◄────┘
//!                   │
//!                   └► … ─► rms_norm ─► project ─► read ─► logits
//! ```

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvcore::{Backend, Stream, TensorView};

use crate::error::Result;

mod activation;
#[cfg(feature = "ascend")]
mod ascend;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "ascend", feature = "cuda"))]
mod device;
mod host;
mod stored;

pub use activation::{Activation, RowIndex};
#[cfg(feature = "ascend")]
pub use ascend::AscendDense;
#[cfg(feature = "cuda")]
pub use cuda::CudaDense;
pub(crate) use host::products;
pub use host::{HostDense, OutputTensor, lend_tensor};
pub use kvbackend_cpu::dense::{SharedBytes, StoredType};
pub use stored::StoredWeight;
pub(crate) use stored::bytes_of;

/// The format in which a model holds the weights of its projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum WeightFormat {
    /// As they are stored: f32, f16, bf16, or blocks (`Q8_0`, `Q4_K`, …).
    #[default]
    Stored,
    /// f32, regardless of their stored type.
    F32,
    /// Eight-bit blocks of 32 elements (ggml's `Q8_0`), with about a quarter of the memory traffic in decode.
    /// Projections whose input width is no multiple of 32, and weights that are stored in blocks, keep their
    /// type.
    Q8,
}

/// The use of a weight, which decides how an implementation holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightUse {
    /// The factors of a norm or the terms of a bias, `[width]`, in full precision.
    Vector,
    /// The embeddings, `[vocabulary, width]`, whose rows [`Dense::embed`] returns.
    Table,
    /// The matrix of a projection, `[out, input]`, in a format of the caller's choice.
    Projection(WeightFormat),
    /// The matrix of a projection, `[out, input]`, in full precision regardless of its stored type.
    ExactProjection,
    /// A matrix for each head, `[heads, a, b]`, in full precision. `x · matrix` is computed.
    ByHead,
    /// A matrix for each head, `[heads, b, a]`, in full precision. `x · matrixᵀ` is computed.
    ByHeadTransposed,
}

/// A weight as an implementation holds it.
pub trait Weight: fmt::Debug + Send + Sync {
    /// Returns the number of bytes of memory for this weight alone; 0 if it shares the memory of another
    /// weight.
    fn bytes(&self) -> usize;

    /// Returns the weight as [`Any`](std::any::Any), for its implementation to downcast.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// An implementation of the dense steps.
///
/// - **Results**: steps compute in f32, or with results that equal f32's up to rounding. No step changes its
///   inputs.
/// - **Order**: a step may return before its work is done. Later steps see its results, and
///   [`read`](Self::read) waits for them. A [`Border`] orders the steps and the operations of a stream.
/// - **Empty batches**: the number of rows may be 0 in every step; the result then has no rows either.
/// - **Handles**: a weight or an activation of another implementation is refused with
///   [`kvcore::Error::ForeignHandle`].
/// - **Threads**: several threads may call one implementation, each with a border and activations of its own.
/// - **Shapes**: the caller guarantees that extents fit, as [`Model`](crate::Model) does. An implementation
///   may return an error otherwise, and reads no memory that is not its own.
///
/// Errors of the library underneath are [`Error::Dense`](crate::Error::Dense).
// Decision: docs/decisions/models.md#dense-steps-are-a-trait-of-small-steps
pub trait Dense: fmt::Debug + Send + Sync {
    /// Returns the name of the implementation. It is part of the key of a model, because implementations
    /// round differently.
    fn name(&self) -> &'static str;

    /// Takes a weight in its stored format: converts, copies or uploads it.
    ///
    /// # Errors
    /// Returns [`Error::Weight`](crate::Error::Weight), with the name, for a stored type that the
    /// implementation does not know or a shape that does not suit the use.
    fn load(&self, stored: &StoredWeight, purpose: WeightUse) -> Result<Arc<dyn Weight>>;

    /// Returns the matrix of an output head that equals the table of embeddings. Shares the table's memory if
    /// the format allows.
    fn tied_head(&self, table: &dyn Weight, format: WeightFormat) -> Result<Arc<dyn Weight>>;

    /// Creates the border to the KV side for passes of up to `extents.rows` rows on a backend.
    fn border(&self, backend: &dyn Backend, extents: &BorderExtents) -> Result<Box<dyn Border>>;

    /// Creates a list of row numbers.
    fn index(&self, rows: Vec<u32>) -> Result<RowIndex>;

    /// Returns whether the steps can be captured with the operations of a stream after which a [`Border`] has
    /// ordered them. In that case, everything is enqueued on the device, [`embed`](Self::embed) accepts
    /// tokens that a replay may change, and a capture refuses only steps that read or write on the host.
    fn joins_captures(&self) -> bool {
        false
    }

    /// Returns the embeddings of tokens, `[tokens, width]`. The caller guarantees that the table has a row
    /// for each token.
    fn embed(&self, table: &dyn Weight, tokens: &[u32]) -> Result<Activation>;

    /// Returns `x / √(mean(x²) + eps) · weight` over the last axis, of rows or of heads.
    fn rms_norm(&self, x: &Activation, weight: &dyn Weight, eps: f64) -> Result<Activation>;

    /// Returns `x · matrixᵀ + bias`, `[rows, out]` of `[rows, input]`.
    fn project(&self, x: &Activation, matrix: &dyn Weight, bias: Option<&dyn Weight>) -> Result<Activation>;

    /// Multiplies each head of `[rows, heads, a]` by its own matrix. Returns `[rows, heads, b]`.
    fn by_head(&self, x: &Activation, matrices: &dyn Weight) -> Result<Activation>;

    /// Returns `silu(gate) ⊙ up`.
    fn gated(&self, gate: &Activation, up: &Activation) -> Result<Activation>;

    /// Returns `x + y`.
    fn add(&self, x: &Activation, y: &Activation) -> Result<Activation>;

    /// Returns `[rows, width]` as heads of `dim` elements, `[rows, width / dim, dim]`. Elements need not
    /// move.
    fn split_heads(&self, x: &Activation, dim: usize) -> Result<Activation>;

    /// Returns `[rows, heads, dim]` as `[rows, heads · dim]`. Elements need not move.
    fn join_heads(&self, x: &Activation) -> Result<Activation>;

    /// Returns some elements of the last axis. The result may share the memory of `x`.
    fn columns(&self, x: &Activation, columns: Range<usize>) -> Result<Activation>;

    /// Returns some rows, in the order of the list. The caller guarantees that `x` has them.
    fn select(&self, x: &Activation, rows: &RowIndex) -> Result<Activation>;

    /// Returns as many zeros as `x` has elements.
    fn zeros_like(&self, x: &Activation) -> Result<Activation>;

    /// Returns `sum` with `factors[i] · y[i]` added to its row `rows[i]`. The caller guarantees that no row
    /// is named twice.
    fn add_rows(
        &self,
        sum: &Activation,
        rows: &RowIndex,
        factors: Vec<f32>,
        y: &Activation,
    ) -> Result<Activation>;

    /// Waits for `x`, and replaces the contents of `values` by its elements in row-major order.
    fn read(&self, x: &Activation, values: &mut Vec<f32>) -> Result<()>;
}

/// The extents of the tensors that cross a border.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BorderExtents {
    /// The largest number of rows of a pass.
    pub rows: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads of a row in K.
    pub k_heads: usize,
    /// The number of heads of a row in V.
    pub v_heads: usize,
    /// The number of elements of a head in K, and of a query.
    pub k_dim: usize,
    /// The number of elements of a head in V, and of attention's output.
    pub v_dim: usize,
    /// True if queries also have a part of `v_dim` elements that meets latents.
    pub latent: bool,
}

/// An input of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionInput {
    /// The queries, `[rows, heads, k_dim]`.
    Query,
    /// The queries of latent attention in the latent's space, `[rows, heads, v_dim]`.
    LatentQuery,
    /// The keys, `[rows, k_heads, k_dim]`.
    Key,
    /// The values, `[rows, v_heads, v_dim]`.
    Value,
}

/// The border between dense steps and the operations of a stream, for one pass at a time.
///
/// If the operations can reach the memory of activations (steps on a device, or steps on the host with the
/// CPU backend), activations are lent: a view *is* the activation, nothing is copied, and the border only
/// orders the two sides. Between the host and a device, a border is a set of buffers into which rows are
/// copied.
///
/// - A view of an input is valid until the same input is lent again or the border is dropped.
/// - The order of calls is the order of work: operations that are launched on `stream` after
///   [`lend`](Self::lend) see the rows, and [`take`](Self::take) sees the results of operations that were
///   launched before it.
/// - All calls for one pass name the same stream.
pub trait Border: fmt::Debug + Send + Sync {
    /// Returns the largest number of rows of a pass.
    fn rows(&self) -> usize;

    /// Orders all later steps after everything that was launched on `stream`. Steps that wait for their
    /// inputs, such as steps on the host, need nothing.
    fn follow(&mut self, stream: &dyn Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Orders all later launches on `stream` after the steps so far.
    fn precede(&mut self, stream: &dyn Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Returns rows as a view in f32 for operations of `stream` to read. The caller guarantees that no
    /// operation writes it.
    fn lend(&mut self, stream: &dyn Stream, input: AttentionInput, rows: &Activation) -> Result<TensorView>;

    /// Returns a copy of rows as a view in f32 that operations of `stream` may also write. The activation is
    /// unchanged.
    fn lend_copy(
        &mut self,
        stream: &dyn Stream,
        input: AttentionInput,
        rows: &Activation,
    ) -> Result<TensorView>;

    /// Returns the view `[rows, heads, v_dim]` in f32 for operations of `stream` to write.
    fn output(&mut self, stream: &dyn Stream, rows: usize) -> Result<TensorView>;

    /// Returns the output of attention, which operations of `stream` have written to the view of
    /// [`output`](Self::output), as an activation. If no other handle of the view is left, nothing is copied.
    fn take(&mut self, stream: &dyn Stream, output: TensorView) -> Result<Activation>;
}
