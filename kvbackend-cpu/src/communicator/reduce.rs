//! Element-wise reductions over the bytes of all ranks.

use bytemuck::Pod;
use half::{bf16, f16};
use kvcore::{DType, ReduceOp, Result};

use crate::element::{Element, unsupported};

/// Combines the parts of all ranks, in rank order. Floats are combined in f32 and rounded once.
pub(super) fn reduced(dtype: DType, op: ReduceOp, parts: &[Vec<u8>]) -> Result<Vec<u8>> {
    match dtype {
        DType::F32 => Ok(floats::<f32>(op, parts)),
        DType::F16 => Ok(floats::<f16>(op, parts)),
        DType::BF16 => Ok(floats::<bf16>(op, parts)),
        DType::I8 => {
            let combine = match op {
                ReduceOp::Sum => i8::wrapping_add,
                ReduceOp::Min => i8::min,
                ReduceOp::Max => i8::max,
            };
            Ok(combined(parts, |x: i8| x, combine, |x| x))
        }
        other => Err(unsupported(other)),
    }
}

fn floats<T: Element>(op: ReduceOp, parts: &[Vec<u8>]) -> Vec<u8> {
    let combine = match op {
        ReduceOp::Sum => |a, b| a + b,
        ReduceOp::Min => f32::min,
        ReduceOp::Max => f32::max,
    };
    combined(parts, T::to_f32, combine, T::from_f32)
}

/// Combines parts whose elements have type `T`. The parts need not be aligned.
fn combined<T: Pod, A>(
    parts: &[Vec<u8>],
    widen: impl Fn(T) -> A,
    combine: fn(A, A) -> A,
    narrow: impl Fn(A) -> T,
) -> Vec<u8> {
    let mut all = parts.first().cloned().unwrap_or_default();
    for (at, element) in all.chunks_exact_mut(size_of::<T>()).enumerate() {
        let start = at * size_of::<T>();
        let of = |part: &Vec<u8>| widen(bytemuck::pod_read_unaligned(&part[start..][..size_of::<T>()]));
        if let Some(value) = parts.iter().map(of).reduce(combine) {
            element.copy_from_slice(bytemuck::bytes_of(&narrow(value)));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_half_precision_are_rounded_once() {
        let part = |x: f32| f16::from_f32(x).to_ne_bytes().to_vec();
        // If each partial sum were rounded to f16, 2048 + 1 would stay 2048.
        let parts = [part(2048.0), part(1.0), part(1.0), part(1.0), part(1.0)];
        assert_eq!(reduced(DType::F16, ReduceOp::Sum, &parts), Ok(part(2052.0)));
    }

    #[test]
    fn sums_of_integers_wrap() {
        let parts = [vec![100, 0x80], vec![100, 0xff]];
        assert_eq!(reduced(DType::I8, ReduceOp::Sum, &parts), Ok(vec![200, 0x7f]));
        assert_eq!(reduced(DType::I8, ReduceOp::Min, &parts), Ok(vec![100, 0x80]));
        assert_eq!(reduced(DType::I8, ReduceOp::Max, &parts), Ok(vec![100, 0xff]));
        assert!(reduced(DType::U8, ReduceOp::Max, &parts).is_err());
    }
}
