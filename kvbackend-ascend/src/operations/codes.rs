//! Codes of int8 caches, as defined by [`kvcore::IntKind::Int8`]: each group of a row has one f16 scale.
//!
//! A scale is the group's largest magnitude divided by 127, rounded up to f16. CANN rounds to nearest, so a
//! scale that is too small after rounding is replaced by the next larger f16. A group with a non-finite
//! element gets a NaN scale and reads back as NaN; a group whose elements are all smaller in magnitude than
//! the smallest normal f32 reads back as 0.

use kvcore::Result;

use super::plans::StepWork;
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::Work;

/// The largest code.
const LARGEST: f32 = 127.0;

/// Three quarters of the distance from an f16 to the next one, relative to the smallest number with the same
/// exponent. A number plus this step rounds to the next f16.
const STEP: f32 = 0.75 / 1024.0;
/// Three quarters of the distance between neighbouring subnormal f16 numbers.
const LEAST_STEP: f32 = 0.75 / 16_777_216.0;

/// A number that is smaller than every scale except 0.
const TINY: f32 = 1e-30;

/// Returns codes times the scales of their groups, in f32. Codes and scales must be in the same order.
pub(super) fn decoded(work: &mut Work<'_>, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let all = |x: &Tensor| x.dims().iter().product::<usize>();
    let (groups, elements) = (all(scales), all(codes));
    let values = work.temporary(sys::ACL_FLOAT, &codes.dims())?;
    let factors = work.temporary(sys::ACL_FLOAT, &[groups, 1])?;
    work.convert(codes, &values)?;
    work.convert(&scales.reshaped(&[groups, 1]), &factors)?;
    let by_group = values.reshaped(&[groups, elements / groups.max(1)]);
    work.mul(&by_group, &factors, &by_group)?;
    Ok(values)
}

// Decision: docs/decisions/backend-ascend.md#int8-codes-are-computed-by-plain-operators
/// Returns the codes of dense f32 rows, and one scale per `group` elements.
pub(super) fn encoded(work: &mut StepWork<'_, '_>, rows: &Tensor, group: usize) -> Result<(Tensor, Tensor)> {
    let groups = rows.dims().iter().product::<usize>() / group;
    let by_group = rows.reshaped(&[groups, group]);
    let (scales, factors) = scales(work, &by_group)?;
    let tiny = work.number(TINY)?.reshaped(&[1, 1]);
    work.maximum(&factors, &tiny, &factors)?;
    let steps = work.temporary(sys::ACL_FLOAT, &[groups, group])?;
    work.div(&by_group, &factors, &steps)?;
    work.round(&steps, &steps)?;
    work.clamp(&steps, -LARGEST, LARGEST, &steps)?;
    let codes = work.temporary(sys::ACL_INT8, &[groups, group])?;
    work.convert(&steps, &codes)?;
    Ok((codes, scales))
}

/// Returns the groups' scales, `[groups, 1]`, in f16 and in f32.
fn scales(work: &mut StepWork<'_, '_>, x: &Tensor) -> Result<(Tensor, Tensor)> {
    let groups = x.dim(0);
    let one = [groups, 1];
    let numbers = |work: &mut StepWork<'_, '_>| work.temporary(sys::ACL_FLOAT, &one);
    // The element with the largest magnitude is either the largest or the smallest element.
    let (largest, smallest, negated) =
        (numbers(work)?, numbers(work)?, work.temporary(sys::ACL_FLOAT, &x.dims())?);
    work.greatest(x, &largest)?;
    work.scale(x, -1.0, &negated)?;
    work.greatest(&negated, &smallest)?;
    work.maximum(&largest, &smallest, &largest)?;
    let (near, scale) = (work.temporary(sys::ACL_FLOAT16, &one)?, numbers(work)?);
    let limit = work.number(LARGEST)?.reshaped(&[1, 1]);
    work.div(&largest, &limit, &scale)?;
    work.convert(&scale, &near)?;
    work.convert(&near, &scale)?;
    // 1 where the scale times the largest code is less than the largest magnitude, otherwise 0; NaN for a
    // group with a non-finite element.
    let (short, step) = (numbers(work)?, numbers(work)?);
    work.scale(&scale, LARGEST, &short)?;
    work.sub(&largest, &short, &short)?;
    work.scale(&short, f32::MAX, &short)?;
    work.clamp(&short, 0.0, 1.0, &short)?;
    work.scale(&scale, STEP, &step)?;
    let least = work.number(LEAST_STEP)?.reshaped(&[1, 1]);
    work.maximum(&step, &least, &step)?;
    work.mul(&step, &short, &step)?;
    work.add(&scale, &step, &scale)?;
    work.convert(&scale, &near)?;
    work.convert(&near, &scale)?;
    Ok((near, scale))
}
