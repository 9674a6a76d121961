//! The dense steps, each as a sequence of operators.

use std::sync::Arc;

use kvcore::{DType, Error, Result, StepInputs, Storage, TensorView};

use super::{AscendDenseSteps, AscendWeight, matrix_shape, rank};
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::Work;

/// Checks that a weight has the given number of rows and the given width.
fn check(what: &'static str, weight: &AscendWeight, rows: usize, width: usize) -> Result<()> {
    for (expected, got) in [(rows, weight.rows), (width, weight.width)] {
        if expected != got {
            return Err(Error::mismatch(what, expected, got));
        }
    }
    Ok(())
}

/// Checks that all token IDs are below `limit`.
fn check_tokens(tokens: &[u32], limit: usize) -> Result<()> {
    match tokens.iter().find(|&&token| token as usize >= limit) {
        None => Ok(()),
        Some(&token) => Err(Error::OutOfRange { what: "token", value: token.into(), limit: limit as i128 }),
    }
}

/// Sends token IDs to the device. If they are the tokens of the step being captured, each replay sends the
/// tokens of its own step instead.
fn numbers(work: &mut Work<'_>, tokens: &[u32], limit: usize) -> Result<Tensor> {
    let of_step =
        work.captured_step().is_some_and(|step| step.tokens.as_ptr_range() == tokens.as_ptr_range());
    let at = if of_step {
        let make = move |step: &StepInputs| {
            check_tokens(&step.tokens, limit)?;
            Ok(bytemuck::cast_slice(&step.tokens).to_vec())
        };
        work.replayed_list(size_of_val(tokens), Box::new(make))?
    } else {
        work.send(bytemuck::cast_slice(tokens))?.address()
    };
    Ok(Tensor::dense(at, sys::ACL_INT32, &[tokens.len()]))
}

/// Returns a tensor over the row indices that [`AscendDenseSteps::index`] copied to the device.
fn sent(rows: &Arc<dyn Storage>, count: usize) -> Tensor {
    Tensor::dense(rows.address(), sys::ACL_INT32, &[count])
}

impl AscendDenseSteps {
    /// Returns the tokens' embeddings multiplied by `scale`, `[tokens, width]`.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if a token ID is outside the table, or a device error.
    pub fn embed(&self, table: &AscendWeight, tokens: &[u32], scale: f32) -> Result<TensorView> {
        check_tokens(tokens, table.rows)?;
        let out = self.rows(&[tokens.len(), table.width])?;
        self.enqueue(&[&table.storage, out.storage()], |work| {
            let index = numbers(work, tokens, table.rows)?;
            let rows = Tensor::of(&out)?;
            work.take_rows(&table.tensor(&[table.rows, table.width]), &index, &rows)?;
            if scale == 1.0 { Ok(()) } else { work.scale(&rows, scale, &rows) }
        })?;
        Ok(out)
    }

    /// Copies row indices to the device.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn index(&self, rows: &[u32]) -> Result<Arc<dyn Storage>> {
        let storage = self.take(size_of_val(rows).max(1))?;
        let view = TensorView::new(Arc::clone(&storage), DType::U8, &[size_of_val(rows)])?;
        self.stream.write(&view, bytemuck::cast_slice(rows))?;
        self.enqueue(&[], |_| Ok(()))?;
        Ok(storage)
    }

    /// Returns the `count` rows of `x` whose indices are in `rows`. The caller must ensure that `x` has these
    /// rows.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn select(&self, x: &TensorView, rows: &Arc<dyn Storage>, count: usize) -> Result<TensorView> {
        let x = self.dense(x)?;
        let mut shape = x.shape().to_vec();
        shape[0] = count;
        let out = self.rows(&shape)?;
        self.enqueue(&[x.storage(), rows, out.storage()], |work| {
            work.take_rows(&Tensor::of(&x)?, &sent(rows, count), &Tensor::of(&out)?)
        })?;
        Ok(out)
    }

    /// Returns `x / √(mean(x²) + eps) · weight` over the last axis of `[rows, width]` or `[rows, heads,
    /// dim]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the weight's width differs from that of `x`, or a device error.
    pub fn rms_norm(&self, x: &TensorView, weight: &AscendWeight, eps: f32) -> Result<TensorView> {
        let x = self.dense(x)?;
        let width = *x.shape().last().ok_or_else(|| rank(2, &x))?;
        check("numbers of a norm", weight, 1, width)?;
        let out = self.rows(x.shape())?;
        self.enqueue(&[x.storage(), &weight.storage, out.storage()], |work| {
            let x = Tensor::of(&x)?;
            let mut each = x.dims();
            each[x.dims().len() - 1] = 1;
            let deviations = work.temporary(sys::ACL_FLOAT, &each)?;
            work.rms_norm(&x, &weight.tensor(&[width]), eps, &Tensor::of(&out)?, &deviations)
        })?;
        Ok(out)
    }

    /// Returns `x · matrixᵀ + bias`: `[rows, out]` for an `x` of `[rows, input]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the shapes do not match, or a device error.
    pub fn project(
        &self,
        x: &TensorView,
        matrix: &AscendWeight,
        bias: Option<&AscendWeight>,
    ) -> Result<TensorView> {
        let x = self.dense(x)?;
        let (rows, width) = matrix_shape(&x)?;
        check("width of a projection", matrix, matrix.rows, width)?;
        if let Some(bias) = bias {
            check("numbers of a bias", bias, 1, matrix.rows)?;
        }
        let out = self.rows(&[rows, matrix.rows])?;
        let mut uses = vec![x.storage(), &matrix.storage, out.storage()];
        uses.extend(bias.map(|bias| &bias.storage));
        self.enqueue(&uses, |work| {
            let (x, result) = (Tensor::of(&x)?, Tensor::of(&out)?);
            let transposed = matrix.tensor(&[matrix.rows, width]).permuted(&[1, 0]);
            work.multiply_one(&x, &transposed, &result)?;
            match bias {
                Some(bias) => work.add(&result, &bias.tensor(&[1, matrix.rows]), &result),
                None => Ok(()),
            }
        })?;
        Ok(out)
    }

    /// Multiplies each head of `[rows, heads, a]` by its own matrix: `[heads, a, b]`, or `[heads, b, a]` if
    /// `transposed` is true. Returns `[rows, heads, b]`.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the shapes do not match, or a device error.
    pub fn by_head(&self, x: &TensorView, matrices: &AscendWeight, transposed: bool) -> Result<TensorView> {
        let &[rows, heads, a] = x.shape() else { return Err(rank(3, x)) };
        let each = matrices.rows / heads.max(1);
        let (inner, b) = if transposed { (matrices.width, each) } else { (each, matrices.width) };
        check("matrices of heads", matrices, heads * each, matrices.width)?;
        if inner != a {
            return Err(Error::mismatch("width of a head", inner, a));
        }
        let out = self.rows(&[rows, heads, b])?;
        self.enqueue(&[x.storage(), &matrices.storage, out.storage()], |work| {
            let by_head = work.temporary(sys::ACL_FLOAT, &[heads, rows, a])?;
            work.convert(&Tensor::of(x)?.permuted(&[1, 0, 2]), &by_head)?;
            let matrices = matrices.tensor(&[heads, each, matrices.width]);
            let matrices = if transposed { matrices.permuted(&[0, 2, 1]) } else { matrices };
            let products = work.temporary(sys::ACL_FLOAT, &[heads, rows, b])?;
            work.multiply(&by_head, &matrices, &products)?;
            work.convert(&products, &Tensor::of(&out)?.permuted(&[1, 0, 2]))
        })?;
        Ok(out)
    }

    /// Returns `silu(gate) ⊙ up`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn gated(&self, gate: &TensorView, up: &TensorView) -> Result<TensorView> {
        let out = self.rows(gate.shape())?;
        self.enqueue(&[gate.storage(), up.storage(), out.storage()], |work| {
            let result = Tensor::of(&out)?;
            work.silu(&Tensor::of(gate)?, &result)?;
            work.mul(&result, &Tensor::of(up)?, &result)
        })?;
        Ok(out)
    }

    /// Returns `gelu(gate) ⊙ up`, with the tanh approximation of GELU: `gate/2 · (1 + tanh u) · up` with `u =
    /// √(2/π) (gate + 0.044715 gate³)`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn gated_gelu(&self, gate: &TensorView, up: &TensorView) -> Result<TensorView> {
        let out = self.rows(gate.shape())?;
        self.enqueue(&[gate.storage(), up.storage(), out.storage()], |work| {
            let (x, y) = (Tensor::of(gate)?, Tensor::of(&out)?);
            let u = work.temporary(sys::ACL_FLOAT, gate.shape())?;
            work.mul(&x, &x, &u)?;
            work.mul(&u, &x, &u)?;
            work.scale(&u, 0.044_715, &u)?;
            work.add(&u, &x, &u)?;
            work.scale(&u, (2.0 / std::f32::consts::PI).sqrt(), &u)?;
            work.tanh(&u, &y)?;
            work.mul(&y, &x, &y)?;
            work.add(&y, &x, &y)?;
            work.scale(&y, 0.5, &y)?;
            work.mul(&y, &Tensor::of(up)?, &y)
        })?;
        Ok(out)
    }

    /// Returns `x + y`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn add(&self, x: &TensorView, y: &TensorView) -> Result<TensorView> {
        let out = self.rows(x.shape())?;
        self.enqueue(&[x.storage(), y.storage(), out.storage()], |work| {
            work.add(&Tensor::of(x)?, &Tensor::of(y)?, &Tensor::of(&out)?)
        })?;
        Ok(out)
    }

    /// Returns a tensor of zeros with the shape of `x`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn zeros_like(&self, x: &TensorView) -> Result<TensorView> {
        let zeros = self.rows(x.shape())?;
        if !zeros.is_empty() {
            self.enqueue(&[zeros.storage()], |work| work.zero(&Tensor::of(&zeros)?))?;
        }
        Ok(zeros)
    }

    /// Returns `sum` with `factors[i] · y[i]` added to its row `rows[i]`. The caller must ensure that `sum`
    /// has these rows and that no row is listed twice.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if `factors` does not have one entry per row of `y`, or a device error.
    pub fn add_rows(
        &self,
        sum: &TensorView,
        rows: &Arc<dyn Storage>,
        factors: &[f32],
        y: &TensorView,
    ) -> Result<TensorView> {
        let y = self.dense(y)?;
        let (count, width) = matrix_shape(&y)?;
        if factors.len() != count {
            return Err(Error::mismatch("factors of rows", count, factors.len()));
        }
        let out = self.copy(sum)?;
        self.enqueue(&[rows, y.storage(), out.storage()], |work| {
            let (all, index) = (Tensor::of(&out)?, sent(rows, count));
            let upload = work.send(bytemuck::cast_slice(factors))?;
            let factors = Tensor::dense(upload.address(), sys::ACL_FLOAT, &[count, 1]);
            let mut part = || work.temporary(sys::ACL_FLOAT, &[count, width]);
            let (some, scaled) = (part()?, part()?);
            work.take_rows(&all, &index, &some)?;
            work.mul(&Tensor::of(&y)?, &factors, &scaled)?;
            work.add(&some, &scaled, &some)?;
            work.put_rows(&all, &index, &some)
        })?;
        Ok(out)
    }
}
