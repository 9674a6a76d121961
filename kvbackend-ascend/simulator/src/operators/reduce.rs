//! Maxima and sums along axes, and row norms.

use std::sync::Arc;

use super::{TensorArgument, check_apart, check_types, operator, place, strides_along, walk};
use crate::executor::{First, wrong};
use crate::state::CallResult;
use crate::task::Action;
use crate::tensor::{View, load, store};
use crate::types as sys;

type AxesArgument = *const sys::aclIntArray;

/// Checks a reduction along the given axes, whose extent in the result must be 1, and returns its action.
fn reduce(
    first: &mut First<'_>,
    (x, axes, keep, out): (TensorArgument, AxesArgument, bool, TensorArgument),
    start: f32,
    f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
) -> CallResult<Action> {
    let (x, out, axes) = (first.tensor(x)?, first.output(out)?, first.array(axes)?);
    check_types(&[&x, &out])?;
    check_apart(&out, &[&x])?;
    let rank = x.dims.len() as i64;
    let mut dims = x.dims.clone();
    for axis in axes {
        let axis = if axis < 0 { axis + rank } else { axis };
        if !(0..rank).contains(&axis) {
            return wrong(format!("axis {axis} of {rank}"));
        }
        dims[axis as usize] = 1;
    }
    if !keep || dims != out.dims {
        return wrong(format!("a result of {:?} where {dims:?} is expected", out.dims));
    }
    let along = strides_along(&out, &x.dims)?;
    Ok(Arc::new(move |state, moment| {
        let from = place(state, &x, moment, false)?;
        let to = place(state, &out, moment, true)?;
        let mut results = vec![start; out.bytes().map_or(0, |_| span(&out))];
        walk(&x.dims, &[&x.strides, &along], |[x_at, o]| {
            // SAFETY: the offset is in the view, which is alive.
            results[o] = f(results[o], unsafe { load(x.dtype, from, x_at) });
        });
        walk(&out.dims, &[&out.strides], |[o]| {
            // SAFETY: the offset is in the view, which is alive.
            unsafe { store(out.dtype, to, o, results[o]) };
        });
        Ok(())
    }))
}

/// Returns the number of elements from the first through the last, including gaps.
fn span(view: &View) -> usize {
    view.dims.iter().zip(&view.strides).map(|(n, stride)| (n - 1) * stride).sum::<usize>() + 1
}

fn norm(
    first: &mut First<'_>,
    x: TensorArgument,
    gamma: TensorArgument,
    eps: f64,
    y: TensorArgument,
    rstd: TensorArgument,
) -> CallResult<Action> {
    let (x, gamma, y, rstd) = (first.tensor(x)?, first.tensor(gamma)?, first.output(y)?, first.output(rstd)?);
    check_types(&[&x, &gamma, &y])?;
    let width = *x.dims.last().unwrap_or(&0);
    let dense = [&x, &gamma, &y, &rstd].iter().all(|view| view.is_dense());
    if !dense || gamma.dims != [width] || x.dims != y.dims || rstd.dtype != sys::ACL_FLOAT || width == 0 {
        return wrong(format!("a norm of {:?} by {:?}", x.dims, gamma.dims));
    }
    let rows = x.len() / width;
    if rstd.len() != rows {
        return wrong(format!("{} deviations for {rows} rows", rstd.len()));
    }
    Ok(Arc::new(move |state, moment| {
        let (from, by) = (place(state, &x, moment, false)?, place(state, &gamma, moment, false)?);
        let (to, deviations) = (place(state, &y, moment, true)?, place(state, &rstd, moment, true)?);
        for row in 0..rows {
            // SAFETY: the rows are in the views, which are alive.
            unsafe {
                let at = |i: usize| load(x.dtype, from, row * width + i);
                let squares: f32 = (0..width).map(|i| at(i) * at(i)).sum();
                let scale = 1.0 / (squares / width as f32 + eps as f32).sqrt();
                store(sys::ACL_FLOAT, deviations, row, scale);
                for i in 0..width {
                    store(y.dtype, to, row * width + i, at(i) * scale * load(gamma.dtype, by, i));
                }
            }
        }
        Ok(())
    }))
}

operator!(aclnnAmax, aclnnAmaxGetWorkspaceSize, (x: TensorArgument, axes: AxesArgument, keep: bool, out: TensorArgument), |first, x, axes, keep, out| {
    reduce(first, (x, axes, keep, out), f32::NEG_INFINITY, |a, b| if a.is_nan() || a > b { a } else { b })
});
operator!(
    aclnnReduceSum,
    aclnnReduceSumGetWorkspaceSize,
    (x: TensorArgument, axes: AxesArgument, keep: bool, dtype: sys::aclDataType, out: TensorArgument),
    |first, x, axes, keep, dtype, out| {
        if first.tensor(out)?.dtype != dtype {
            return wrong("a sum of another type than its result");
        }
        reduce(first, (x, axes, keep, out), 0.0, |a, b| a + b)
    }
);
operator!(aclnnRmsNorm, aclnnRmsNormGetWorkspaceSize, (x: TensorArgument, gamma: TensorArgument, eps: f64, y: TensorArgument, rstd: TensorArgument), norm);
