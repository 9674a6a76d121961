//! Matrix products.

use std::sync::Arc;

use super::{TensorArgument, check_apart, check_types, operator, place};
use crate::executor::{First, wrong};
use crate::state::CallResult;
use crate::task::Action;
use crate::tensor::{View, load, store};

/// The only supported value of aclnn's argument `cubeMathType`: products keep the operands' element types.
const KEEP: i8 = 0;

/// A batch of matrices, `[batch, rows, columns]`.
struct Matrices(View);

impl Matrices {
    /// Accepts dense matrices, including transposed ones.
    fn new(view: View) -> CallResult<Self> {
        let (dims, strides) = (view.dims.clone(), view.strides.clone());
        let mut exchanged = view.clone();
        exchanged.dims.swap(1, 2);
        exchanged.strides.swap(1, 2);
        if dims.len() == 3 && (view.is_dense() || exchanged.is_dense()) {
            return Ok(Self(view));
        }
        wrong(format!("matrices of extents {dims:?} and strides {strides:?}"))
    }

    fn extents(&self) -> (usize, usize, usize) {
        (self.0.dims[0], self.0.dims[1], self.0.dims[2])
    }

    /// Reads one matrix in row-major order.
    fn read(&self, from: *const u8, batch: usize) -> Vec<f32> {
        let (batches, rows, columns) = self.extents();
        let first = if batches == 1 { 0 } else { batch * self.0.strides[0] };
        let mut values = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            for column in 0..columns {
                let at = first + row * self.0.strides[1] + column * self.0.strides[2];
                // SAFETY: the offset is in the view, which is alive.
                values.push(unsafe { load(self.0.dtype, from, at) });
            }
        }
        values
    }
}

fn multiply(a: View, b: View, out: View, types: i8) -> CallResult<Action> {
    check_types(&[&a, &b, &out])?;
    check_apart(&out, &[&a, &b])?;
    if types != KEEP {
        return wrong(format!("products in another type: {types}"));
    }
    let (a, b) = (Matrices::new(a)?, Matrices::new(b)?);
    let ((batch_a, m, k), (batch_b, k_b, n)) = (a.extents(), b.extents());
    let batch = batch_a.max(batch_b);
    let fits = k == k_b && (batch_a == batch || batch_a == 1) && (batch_b == batch || batch_b == 1);
    if !fits || out.dims != [batch, m, n] || !out.is_dense() {
        return wrong(format!("{:?} by {:?} into {:?}", a.0.dims, b.0.dims, out.dims));
    }
    Ok(Arc::new(move |state, moment| {
        let (from_a, from_b) = (place(state, &a.0, moment, false)?, place(state, &b.0, moment, false)?);
        let to = place(state, &out, moment, true)?;
        let mut row = vec![0.0f32; n];
        for number in 0..batch {
            let (a, b) = (a.read(from_a, number), b.read(from_b, number));
            for i in 0..m {
                row.fill(0.0);
                for (x, b) in a[i * k..(i + 1) * k].iter().zip(b.chunks_exact(n.max(1))) {
                    row.iter_mut().zip(b).for_each(|(sum, y)| *sum += x * y);
                }
                for (j, &x) in row.iter().enumerate() {
                    // SAFETY: the offset is in the view, which is alive.
                    unsafe { store(out.dtype, to, (number * m + i) * n + j, x) };
                }
            }
        }
        Ok(())
    }))
}

/// Returns a matrix as a batch of one.
fn as_batch(mut view: View) -> View {
    let whole = view.dims.iter().product();
    view.dims.insert(0, 1);
    view.strides.insert(0, whole);
    view
}

fn matmul(
    first: &mut First<'_>,
    a: TensorArgument,
    b: TensorArgument,
    out: TensorArgument,
    types: i8,
) -> CallResult<Action> {
    let (a, b, out) = (first.tensor(a)?, first.tensor(b)?, first.output(out)?);
    if [&a, &b, &out].iter().any(|view| view.dims.len() != 2) {
        return wrong("a product of matrices that have no two axes");
    }
    multiply(as_batch(a), as_batch(b), as_batch(out), types)
}

operator!(
    aclnnBatchMatMul,
    aclnnBatchMatMulGetWorkspaceSize,
    (a: TensorArgument, b: TensorArgument, out: TensorArgument, types: i8),
    |first, a, b, out, types| {
        let (a, b, out) = (first.tensor(a)?, first.tensor(b)?, first.output(out)?);
        multiply(a, b, out, types)
    }
);
operator!(aclnnMatmul, aclnnMatmulGetWorkspaceSize, (a: TensorArgument, b: TensorArgument, out: TensorArgument, types: i8), matmul);
