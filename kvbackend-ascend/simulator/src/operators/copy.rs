//! Copies between views, with and without type conversion.

use std::sync::Arc;

use super::{TensorArgument, check_apart, operator, place, strides_along, walk};
use crate::executor::{First, wrong};
use crate::state::CallResult;
use crate::task::Action;
use crate::tensor::{View, load, size_of_type, store};
use crate::types as sys;

const CAST: [sys::aclDataType; 5] =
    [sys::ACL_FLOAT, sys::ACL_FLOAT16, sys::ACL_BF16, sys::ACL_INT8, sys::ACL_INT32];

fn copy(from: View, out: View) -> CallResult<Action> {
    check_apart(&out, &[&from])?;
    let strides = strides_along(&from, &out.dims)?;
    if from.dtype != out.dtype && !(CAST.contains(&from.dtype) && CAST.contains(&out.dtype)) {
        return wrong(format!("a copy from type {} to {}", from.dtype, out.dtype));
    }
    Ok(Arc::new(move |state, moment| {
        let src = place(state, &from, moment, false)?;
        let dst = place(state, &out, moment, true)?;
        let size = size_of_type(out.dtype);
        walk(&out.dims, &[&out.strides, &strides], |[o, i]| {
            // SAFETY: the offsets are in the views, which are alive.
            unsafe {
                if from.dtype == out.dtype {
                    std::ptr::copy_nonoverlapping(src.add(i * size), dst.add(o * size), size);
                } else {
                    store(out.dtype, dst, o, load(from.dtype, src, i));
                }
            }
        });
        Ok(())
    }))
}

fn cast(
    first: &mut First<'_>,
    x: TensorArgument,
    dtype: sys::aclDataType,
    out: TensorArgument,
) -> CallResult<Action> {
    let (x, out) = (first.tensor(x)?, first.output(out)?);
    if out.dtype != dtype || x.dims != out.dims {
        return wrong(format!(
            "a cast to {dtype} with a result of type {}, {:?} to {:?}",
            out.dtype, x.dims, out.dims
        ));
    }
    copy(x, out)
}

operator!(aclnnCast, aclnnCastGetWorkspaceSize, (x: TensorArgument, dtype: sys::aclDataType, out: TensorArgument), cast);
operator!(aclnnInplaceCopy, aclnnInplaceCopyGetWorkspaceSize, (out: TensorArgument, x: TensorArgument), |first, out, x| {
    let (out, x) = (first.output(out)?, first.tensor(x)?);
    copy(x, out)
});
