//! The dense steps of a model: everything between token IDs and logits except attention.
//!
//! A model holds its steps as `Arc<dyn Dense>`. [`HostDense`] computes them on the host. An implementation on
//! a device keeps weights and activations in the device's memory: only token IDs are uploaded, and only
//! logits are read back (with routed experts, also the experts' scores).
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
pub use host::{HostDense, OutputTensor, lend_tensor};
pub(crate) use kvbackend_cpu::dense::check_regular_file;
pub use kvbackend_cpu::dense::{ComputeType, FileAccess, SharedBytes, StoredType, WeightFile};
pub use stored::StoredWeight;
pub(crate) use stored::bytes_of;

/// The format in which a model stores the weights of its projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum WeightFormat {
    /// Unchanged, in their stored type: f32, f16, bf16, or blocks (`Q8_0`, `Q4_K`, …).
    #[default]
    Stored,
    /// f32, regardless of their stored type.
    F32,
    /// Eight-bit blocks of 32 elements (ggml's `Q8_0`). Decoding then reads about a quarter of the bytes that
    /// it would read with f32. Projections whose input width is not a multiple of 32, and weights that are
    /// already stored in blocks, keep their type.
    Q8,
}

/// The use of a weight, which determines the form in which an implementation stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightUse {
    /// The factors of a norm or the terms of a bias, `[width]`, in full precision.
    Vector,
    /// The embeddings, `[vocabulary, width]`. [`Dense::embed`] returns its rows.
    Table,
    /// The matrix of a projection, `[out, input]`, in a format that the caller chooses.
    Projection(WeightFormat),
    /// The matrix of a projection, `[out, input]`, in full precision regardless of its stored type.
    ExactProjection,
    /// One matrix per head, `[heads, a, b]`, in full precision, for `x · matrix`.
    ByHead,
    /// One matrix per head, `[heads, b, a]`, in full precision, for `x · matrixᵀ`.
    ByHeadTransposed,
}

/// The activation function of a gated feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation: `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
}

/// A weight in an implementation's own form.
pub trait Weight: fmt::Debug + Send + Sync {
    /// Returns the size of this weight's own memory in bytes, or 0 if it shares another weight's memory.
    fn bytes(&self) -> usize;

    /// Returns the weight as [`Any`](std::any::Any), for its implementation to downcast.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// An implementation of the dense steps.
///
/// - **Results**: steps compute in f32, or their results match f32's up to rounding, unless the caller asked
///   for less ([`ComputeType`]). Steps do not change their inputs.
/// - **Order**: a step may return before its work is done. Later steps see its results, and
///   [`read`](Self::read) waits for them. A [`Border`] orders the steps and the operations of a stream.
/// - **Empty batches**: every step accepts inputs without rows. The result then has no rows either.
/// - **Handles**: a weight or an activation from another implementation causes the error
///   [`kvcore::Error::ForeignHandle`].
/// - **Threads**: several threads may call one implementation, each with its own border and activations.
/// - **Shapes**: the caller must ensure that shapes match, as [`Model`](crate::Model) does. If they do not,
///   an implementation may return an error, but must not read memory outside its own.
///
/// Errors of the underlying library are returned as [`Error::Dense`](crate::Error::Dense).
// Decision: docs/decisions/models.md#dense-steps-are-a-trait-of-small-steps
pub trait Dense: fmt::Debug + Send + Sync {
    /// Returns the implementation's name. It is part of [`Model::revision`](crate::Model::revision), because
    /// implementations round differently.
    fn name(&self) -> &'static str;

    /// Returns a note for the user about the weights that were loaded and this machine, if there is one: for example, that
    /// a setting has no effect.
    fn note(&self) -> Option<String> {
        None
    }

    /// Loads a weight from its stored format, by converting, copying or uploading it.
    ///
    /// # Errors
    /// Returns [`Error::Weight`](crate::Error::Weight), with the name, if the implementation does not support
    /// the stored type, or the shape does not suit the use.
    fn load(&self, stored: &StoredWeight, purpose: WeightUse) -> Result<Arc<dyn Weight>>;

    /// Returns the matrix for an output head that is tied to the embedding table. Shares the table's
    /// memory if the format allows it.
    fn tied_head(&self, table: &dyn Weight, format: WeightFormat) -> Result<Arc<dyn Weight>>;

    /// Creates the border between these steps and a backend's operations, for passes of up to
    /// `extents.rows` rows.
    fn border(&self, backend: &dyn Backend, extents: &BorderExtents) -> Result<Box<dyn Border>>;

    /// Creates a list of row indices.
    fn index(&self, rows: Vec<u32>) -> Result<RowIndex>;

    /// Returns true if the steps can be captured in a graph together with a stream's operations, once a
    /// [`Border`] has ordered the steps after the stream. In that case, all steps are enqueued on the device,
    /// a replay may change the tokens given to [`embed`](Self::embed), and a capture fails only if a step
    /// reads or writes host memory.
    fn joins_captures(&self) -> bool {
        false
    }

    /// Returns the embeddings of tokens, multiplied by `scale`, `[tokens, width]`. The table must have a row
    /// for each token.
    fn embed(&self, table: &dyn Weight, tokens: &[u32], scale: f32) -> Result<Activation>;

    /// Returns `x / √(mean(x²) + eps) · weight`, normalised over the last axis of rows or heads.
    fn rms_norm(&self, x: &Activation, weight: &dyn Weight, eps: f64) -> Result<Activation>;

    /// Returns `x · matrixᵀ + bias`. From `[rows, input]`, this gives `[rows, out]`.
    fn project(&self, x: &Activation, matrix: &dyn Weight, bias: Option<&dyn Weight>) -> Result<Activation>;

    /// Multiplies each head of `[rows, heads, a]` by its own matrix. Returns `[rows, heads, b]`.
    fn by_head(&self, x: &Activation, matrices: &dyn Weight) -> Result<Activation>;

    /// Returns `activation(gate) ⊙ up`.
    fn gated(&self, activation: GateActivation, gate: &Activation, up: &Activation) -> Result<Activation>;

    /// Returns `x + y`.
    fn add(&self, x: &Activation, y: &Activation) -> Result<Activation>;

    /// Splits `[rows, width]` into heads of `dim` elements, `[rows, width / dim, dim]`. Implementations
    /// need not move elements.
    fn split_heads(&self, x: &Activation, dim: usize) -> Result<Activation>;

    /// Joins `[rows, heads, dim]` to `[rows, heads · dim]`. Implementations need not move elements.
    fn join_heads(&self, x: &Activation) -> Result<Activation>;

    /// Returns the elements at the indices `columns` of the last axis. The result may share the memory of
    /// `x`.
    fn columns(&self, x: &Activation, columns: Range<usize>) -> Result<Activation>;

    /// Returns the given rows, in the order of the list. `x` must have all of these rows.
    fn select(&self, x: &Activation, rows: &RowIndex) -> Result<Activation>;

    /// Returns zeros in the shape of `x`.
    fn zeros_like(&self, x: &Activation) -> Result<Activation>;

    /// Returns `sum` with `factors[i] · y[i]` added to row `rows[i]`, for every `i`. No row may occur twice
    /// in `rows`.
    fn add_rows(
        &self,
        sum: &Activation,
        rows: &RowIndex,
        factors: Vec<f32>,
        y: &Activation,
    ) -> Result<Activation>;

    /// Waits for `x`, and replaces the contents of `values` with its elements in row-major order.
    fn read(&self, x: &Activation, values: &mut Vec<f32>) -> Result<()>;
}

/// The sizes of the tensors that cross the border between dense steps and a backend's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BorderExtents {
    /// The maximum number of rows per pass.
    pub rows: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of heads per row in K.
    pub k_heads: usize,
    /// The number of heads per row in V.
    pub v_heads: usize,
    /// The number of elements per head in K, and in queries.
    pub k_dim: usize,
    /// The number of elements per head in V, and in attention's output.
    pub v_dim: usize,
    /// True if queries also have a part of `v_dim` elements per head for the latents.
    pub latent: bool,
}

/// An input to attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionInput {
    /// The queries, `[rows, heads, k_dim]`.
    Query,
    /// The queries of latent attention, in the latent's space, `[rows, heads, v_dim]`.
    LatentQuery,
    /// The keys, `[rows, k_heads, k_dim]`.
    Key,
    /// The values, `[rows, v_heads, v_dim]`.
    Value,
}

/// The border between dense steps and the operations of a stream, for one pass at a time.
///
/// If the operations can access the activations' memory (as with steps on the device, or steps on the host
/// and the CPU backend), activations are lent: a view *is* the activation, nothing is copied, and the border
/// only orders the two sides. Between the host and a device, a border is a set of buffers that rows are
/// copied to.
///
/// - A view of an input is valid until the same input is lent again or the border is dropped.
/// - The order of calls is the order of work: operations that are launched on `stream` after
///   [`lend`](Self::lend) see the rows, and [`take`](Self::take) sees the results of operations that were
///   launched before it.
/// - All calls for one pass must use the same stream.
pub trait Border: fmt::Debug + Send + Sync {
    /// Returns the maximum number of rows per pass.
    fn rows(&self) -> usize;

    /// Orders all later steps after everything that was launched on `stream`. The default does nothing,
    /// which is enough for steps that wait for their inputs, such as steps on the host.
    fn follow(&mut self, stream: &dyn Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Orders all later launches on `stream` after all earlier steps.
    fn precede(&mut self, stream: &dyn Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Returns `rows` as an f32 view that operations of `stream` may read but must not write to.
    fn lend(&mut self, stream: &dyn Stream, input: AttentionInput, rows: &Activation) -> Result<TensorView>;

    /// Returns a copy of `rows` as an f32 view that operations of `stream` may read and write. The activation
    /// stays unchanged.
    fn lend_copy(
        &mut self,
        stream: &dyn Stream,
        input: AttentionInput,
        rows: &Activation,
    ) -> Result<TensorView>;

    /// Returns an f32 view `[rows, heads, v_dim]` for operations of `stream` to write to.
    fn output(&mut self, stream: &dyn Stream, rows: usize) -> Result<TensorView>;

    /// Returns the output of attention as an activation, after operations of `stream` have written to the
    /// view from [`output`](Self::output). Nothing is copied if no other handle to the view exists.
    fn take(&mut self, stream: &dyn Stream, output: TensorView) -> Result<Activation>;
}
