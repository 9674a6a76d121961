//! Operators: the checks of their first phase, and the computation of their second.

use crate::clock::TaskMoment;
use crate::executor::wrong;
use crate::state::{CallResult, SimState};
use crate::tensor::{View, size_of_type};
use crate::types as sys;

mod copy;
mod elementwise;
mod index;
mod paged;
mod product;
mod reduce;

/// Exports both phases of an operator. `accept` is called with the first phase's arguments.
macro_rules! operator {
    ($name:ident, $phase:ident, ($($argument:ident: $type:ty),*), $accept:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $phase(
            $($argument: $type,)*
            workspace: *mut u64,
            executor: *mut *mut crate::types::aclOpExecutor,
        ) -> crate::types::aclnnStatus {
            let accept: fn(&mut crate::executor::First<'_>, $($type),*) -> _ = $accept;
            crate::executor::first(stringify!($name), workspace, executor, |first| accept(first, $($argument),*))
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            workspace: *mut std::ffi::c_void,
            bytes: u64,
            executor: *mut crate::types::aclOpExecutor,
            stream: crate::types::aclrtStream,
        ) -> crate::types::aclnnStatus {
            crate::executor::second(stringify!($name), workspace, bytes, executor, stream)
        }
    };
}
pub(crate) use operator;

/// A tensor argument of an operator.
pub(crate) type TensorArgument = *const sys::aclTensor;

/// The element types that operators can compute with.
const COMPUTED: [sys::aclDataType; 3] = [sys::ACL_FLOAT, sys::ACL_FLOAT16, sys::ACL_BF16];

/// Returns an error if operators cannot compute with the operands' types, or if the types differ.
pub(crate) fn check_types(views: &[&View]) -> CallResult {
    let dtype = views[0].dtype;
    if !COMPUTED.contains(&dtype) || views.iter().any(|view| view.dtype != dtype) {
        let types: Vec<_> = views.iter().map(|view| view.dtype).collect();
        return wrong(format!("operands of types {types:?}"));
    }
    Ok(())
}

/// Returns a view's strides along the axes of a result. The stride is 0 along an axis where the view is
/// repeated.
pub(crate) fn strides_along(view: &View, dims: &[usize]) -> CallResult<Vec<usize>> {
    let Some(missing) = dims.len().checked_sub(view.dims.len()) else {
        return wrong(format!("extents {:?} for a result of {dims:?}", view.dims));
    };
    let mut strides = vec![0; missing];
    for ((&n, &stride), &wanted) in view.dims.iter().zip(&view.strides).zip(&dims[missing..]) {
        if n != wanted && n != 1 {
            return wrong(format!("extents {:?} for a result of {dims:?}", view.dims));
        }
        strides.push(if n == 1 { 0 } else { stride });
    }
    Ok(strides)
}

/// Returns an error if a result shares elements with an operand, unless both are the same view.
pub(crate) fn check_apart(out: &View, others: &[&View]) -> CallResult {
    for other in others {
        if let (Some(a), Some(b)) = (out.bytes(), other.bytes())
            && a.start < b.end
            && b.start < a.end
            && *other != out
        {
            // Rows of one tensor may interleave without sharing elements.
            let distance = (b.start as i64 - a.start as i64) / size_of_type(out.dtype) as i64;
            let alike = out.dims == other.dims && out.strides == other.strides && out.dtype == other.dtype;
            let mut axes: Vec<(usize, usize)> =
                out.strides.iter().copied().zip(out.dims.iter().copied()).collect();
            axes.sort_unstable();
            if !alike || coincide(distance, &axes) {
                return wrong("a result that lies in an operand");
            }
        }
    }
    Ok(())
}

/// Returns whether a view shares elements with a copy of itself that is shifted by `distance`. `axes` are its
/// strides and extents, with the largest stride last.
fn coincide(distance: i64, axes: &[(usize, usize)]) -> bool {
    let Some((&(stride, n), inner)) = axes.split_last() else { return distance == 0 };
    let (stride, n) = (stride.max(1) as i64, n as i64);
    let steps = distance.div_euclid(stride);
    [steps, steps + 1].iter().any(|&k| k.abs() < n && coincide(distance - k * stride, inner))
}

/// Calls `f` for every element of a result, with the element's offsets in the result and in the operands.
pub(crate) fn walk<const N: usize>(dims: &[usize], strides: &[&[usize]; N], mut f: impl FnMut([usize; N])) {
    let (Some((&inner, outer)), true) = (dims.split_last(), !dims.contains(&0)) else { return };
    let mut index = vec![0; outer.len()];
    loop {
        let mut at = [0; N];
        for (at, strides) in at.iter_mut().zip(strides) {
            *at = index.iter().zip(*strides).map(|(i, stride)| i * stride).sum();
        }
        for _ in 0..inner {
            f(at);
            for (at, strides) in at.iter_mut().zip(strides) {
                *at += strides[outer.len()];
            }
        }
        let Some(axis) = (0..outer.len()).rev().find(|&axis| {
            index[axis] += 1;
            let more = index[axis] < outer[axis];
            if !more {
                index[axis] = 0;
            }
            more
        }) else {
            return;
        };
        let _ = axis;
    }
}

/// Returns the host pointer to a view that a task reads or writes, or a dangling pointer if the view is
/// empty.
pub(crate) fn place(
    state: &mut SimState,
    view: &View,
    moment: &TaskMoment,
    writes: bool,
) -> Result<*mut u8, String> {
    match view.bytes() {
        Some(bytes) => state.touch(&bytes, moment, writes),
        None => Ok(std::ptr::dangling_mut()),
    }
}
