//! Element-wise operators: sums, products, exponentials.

use std::sync::Arc;

use super::{TensorArgument, check_apart, check_types, operator, place, strides_along, walk};
use crate::executor::{First, wrong};
use crate::state::CallResult;
use crate::task::Action;
use crate::tensor::{HostNumber, View, load, store};
use crate::types as sys;

/// Checks an operator with two operands, and returns its action.
fn of_two(
    first: &mut First<'_>,
    (a, b, out): (*const sys::aclTensor, *const sys::aclTensor, *const sys::aclTensor),
    f: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
) -> CallResult<Action> {
    let (a, b, out) = (first.tensor(a)?, first.tensor(b)?, first.output(out)?);
    check_types(&[&a, &b, &out])?;
    check_apart(&out, &[&a, &b])?;
    let (of_a, of_b) = (strides_along(&a, &out.dims)?, strides_along(&b, &out.dims)?);
    Ok(Arc::new(move |state, moment| {
        let (from_a, from_b) = (place(state, &a, moment, false)?, place(state, &b, moment, false)?);
        let to = place(state, &out, moment, true)?;
        let dtype = out.dtype;
        if dtype == sys::ACL_FLOAT
            && a.is_dense()
            && b.is_dense()
            && out.is_dense()
            && a.len() == b.len()
            && a.len() == out.len()
        {
            let (from_a, from_b, to) = (from_a.cast::<f32>(), from_b.cast::<f32>(), to.cast::<f32>());
            for i in 0..out.len() {
                // SAFETY: all three views are alive and have this element.
                unsafe { to.add(i).write(f(from_a.add(i).read(), from_b.add(i).read())) };
            }
            return Ok(());
        }
        walk(&out.dims, &[&out.strides, &of_a, &of_b], |[o, a, b]| {
            // SAFETY: the offsets are in the views, which are alive.
            unsafe { store(dtype, to, o, f(load(dtype, from_a, a), load(dtype, from_b, b))) };
        });
        Ok(())
    }))
}

/// Checks an operator with one operand, and returns its action.
fn of_one(
    first: &mut First<'_>,
    (x, out): (*const sys::aclTensor, *const sys::aclTensor),
    f: impl Fn(f32) -> f32 + Send + Sync + 'static,
) -> CallResult<Action> {
    let (x, out) = (first.tensor(x)?, first.output(out)?);
    check_types(&[&x, &out])?;
    check_apart(&out, &[&x])?;
    if x.dims != out.dims {
        return wrong(format!("extents {:?} for a result of {:?}", x.dims, out.dims));
    }
    Ok(Arc::new(move |state, moment| {
        let from = place(state, &x, moment, false)?;
        let to = place(state, &out, moment, true)?;
        let View { dtype, .. } = out;
        walk(&out.dims, &[&out.strides, &x.strides], |[o, x]| {
            // SAFETY: the offsets are in the views, which are alive.
            unsafe { store(dtype, to, o, f(load(dtype, from, x))) };
        });
        Ok(())
    }))
}

type NumberArgument = *const sys::aclScalar;

operator!(aclnnAdd, aclnnAddGetWorkspaceSize, (a: TensorArgument, b: TensorArgument, alpha: NumberArgument, out: TensorArgument), |first, a, b, alpha, out| {
    let HostNumber(alpha) = first.scalar(alpha)?;
    of_two(first, (a, b, out), move |a, b| a + alpha * b)
});
operator!(aclnnSub, aclnnSubGetWorkspaceSize, (a: TensorArgument, b: TensorArgument, alpha: NumberArgument, out: TensorArgument), |first, a, b, alpha, out| {
    let HostNumber(alpha) = first.scalar(alpha)?;
    of_two(first, (a, b, out), move |a, b| a - alpha * b)
});
operator!(aclnnMul, aclnnMulGetWorkspaceSize, (a: TensorArgument, b: TensorArgument, out: TensorArgument), |first, a, b, out| {
    of_two(first, (a, b, out), |a, b| a * b)
});
operator!(aclnnDiv, aclnnDivGetWorkspaceSize, (a: TensorArgument, b: TensorArgument, out: TensorArgument), |first, a, b, out| {
    of_two(first, (a, b, out), |a, b| a / b)
});
operator!(aclnnMaximum, aclnnMaximumGetWorkspaceSize, (a: TensorArgument, b: TensorArgument, out: TensorArgument), |first, a, b, out| {
    // NaN stays NaN.
    of_two(first, (a, b, out), |a, b| if a.is_nan() || a > b { a } else { b })
});
operator!(aclnnMuls, aclnnMulsGetWorkspaceSize, (x: TensorArgument, factor: NumberArgument, out: TensorArgument), |first, x, factor, out| {
    let HostNumber(factor) = first.scalar(factor)?;
    of_one(first, (x, out), move |x| x * factor)
});
operator!(aclnnRound, aclnnRoundGetWorkspaceSize, (x: TensorArgument, out: TensorArgument), |first, x, out| {
    of_one(first, (x, out), f32::round_ties_even)
});
operator!(aclnnClamp, aclnnClampGetWorkspaceSize, (x: TensorArgument, least: NumberArgument, most: NumberArgument, out: TensorArgument), |first, x, least, most, out| {
    let (HostNumber(least), HostNumber(most)) = (first.scalar(least)?, first.scalar(most)?);
    // NaN stays NaN.
    of_one(first, (x, out), move |x| if x < least { least } else if x > most { most } else { x })
});
operator!(aclnnExp, aclnnExpGetWorkspaceSize, (x: TensorArgument, out: TensorArgument), |first, x, out| of_one(first, (x, out), f32::exp));
operator!(aclnnLog, aclnnLogGetWorkspaceSize, (x: TensorArgument, out: TensorArgument), |first, x, out| of_one(first, (x, out), f32::ln));
operator!(aclnnTanh, aclnnTanhGetWorkspaceSize, (x: TensorArgument, out: TensorArgument), |first, x, out| of_one(first, (x, out), f32::tanh));
operator!(aclnnSilu, aclnnSiluGetWorkspaceSize, (x: TensorArgument, out: TensorArgument), |first, x, out| {
    of_one(first, (x, out), |x| x / (1.0 + (-x).exp()))
});
