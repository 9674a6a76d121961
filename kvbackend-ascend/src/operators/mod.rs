//! Calls to CANN's operators, with the arguments that the contract's operations need.
//!
//! Each call has two phases: the first checks the operands and returns the size of the operator's workspace;
//! the second enqueues the operator and consumes the executor. This module runs both phases, with the
//! workspace in scratch memory.

use std::ffi::c_void;
use std::sync::Arc;

use kvcore::{Error, Result};

use crate::bindings::{Operators, types as sys};
use crate::device::Npu;
use crate::errors::unsupported;
use crate::queue::Work;

mod fused;
mod tensor;

pub(crate) use fused::PagedAttention;
pub(crate) use tensor::{Tensor, bytes_of, number};

/// The flag that makes matrix products compute in the operands' element type, f32.
const KEEP_TYPES: i8 = 0;

/// A number on the host that is passed to operators.
struct HostScalar {
    raw: *mut sys::aclScalar,
    npu: Arc<Npu>,
}

impl HostScalar {
    fn new(npu: &Arc<Npu>, mut value: f32) -> Result<Self> {
        // SAFETY: `value` is an f32, as `ACL_FLOAT` states; the call copies it.
        let raw = unsafe { npu.library.base.aclCreateScalar((&raw mut value).cast(), sys::ACL_FLOAT) };
        if raw.is_null() {
            return Err(npu.error(sys::ACL_ERROR_INVALID_PARAM as i32));
        }
        Ok(Self { raw, npu: Arc::clone(npu) })
    }
}

impl Drop for HostScalar {
    fn drop(&mut self) {
        // SAFETY: `aclCreateScalar` created the scalar, and it is destroyed once.
        unsafe { self.npu.library.base.aclDestroyScalar(self.raw) };
    }
}

/// A list of numbers on the host, such as axes or lengths, that is passed to operators.
struct NumberList {
    raw: *mut sys::aclIntArray,
    npu: Arc<Npu>,
}

impl NumberList {
    fn new(npu: &Arc<Npu>, numbers: &[i64]) -> Result<Self> {
        // SAFETY: the array has the given length; the call copies it.
        let raw = unsafe { npu.library.base.aclCreateIntArray(numbers.as_ptr(), numbers.len() as u64) };
        if raw.is_null() {
            return Err(npu.error(sys::ACL_ERROR_INVALID_PARAM as i32));
        }
        Ok(Self { raw, npu: Arc::clone(npu) })
    }
}

impl Drop for NumberList {
    fn drop(&mut self) {
        // SAFETY: `aclCreateIntArray` created the array, and it is destroyed once.
        unsafe { self.npu.library.base.aclDestroyIntArray(self.raw) };
    }
}

/// An operator's second phase.
type Second<'a> =
    &'a dyn Fn(&Operators, *mut c_void, u64, *mut sys::aclOpExecutor, sys::aclrtStream) -> sys::aclnnStatus;

impl Work<'_> {
    /// Runs both phases of an operator. The operands must stay alive until this function returns.
    fn operator(
        &mut self,
        name: &'static str,
        first: &dyn Fn(&Operators, *mut u64, *mut *mut sys::aclOpExecutor) -> sys::aclnnStatus,
        second: Second<'_>,
    ) -> Result<()> {
        let npu = self.npu();
        let operators = &npu.library.operators;
        let (mut bytes, mut executor) = (0, std::ptr::null_mut());
        let refused = |code: i32| match npu.error(code) {
            Error::Device { backend, reason } => {
                Error::Device { backend, reason: format!("{name}: {reason}") }
            }
            other => other,
        };
        match first(operators, &raw mut bytes, &raw mut executor) {
            0 => {}
            code => return Err(refused(code)),
        }
        let workspace = match usize::try_from(bytes) {
            Ok(0) => 0,
            Ok(bytes) => self.bytes(bytes).inspect_err(|_| npu.library.discard(executor))?,
            Err(_) => {
                return Err(unsupported(format!("a workspace of {bytes} bytes for {name}")));
            }
        };
        match second(operators, workspace as *mut c_void, bytes, executor, self.stream()) {
            0 => Ok(()),
            code => Err(refused(code)),
        }
    }
}

/// Scratch tensors, and copies to them.
impl Work<'_> {
    /// Returns a dense scratch tensor with arbitrary contents.
    pub(crate) fn temporary(&mut self, dtype: sys::aclDataType, dims: &[usize]) -> Result<Tensor> {
        let overflow = Error::Overflow { what: "elements between operators" };
        let bytes =
            dims.iter().try_fold(bytes_of(dtype), |bytes, &n| bytes.checked_mul(n)).ok_or(overflow)?;
        let at = self.bytes(bytes)?;
        Ok(Tensor::dense(at, dtype, dims))
    }

    /// Returns a dense copy of `x`, converted to the given element type.
    pub(crate) fn copied(&mut self, dtype: sys::aclDataType, x: &Tensor) -> Result<Tensor> {
        let copy = self.temporary(dtype, &x.dims())?;
        self.convert(x, &copy)?;
        Ok(copy)
    }

    /// Returns a dense copy of `x`, converted to f32.
    pub(crate) fn in_f32(&mut self, x: &Tensor) -> Result<Tensor> {
        self.copied(sys::ACL_FLOAT, x)
    }

    /// Returns `x` itself if it is dense and has the given element type, or else a dense copy with that type.
    pub(crate) fn dense_in(&mut self, dtype: sys::aclDataType, x: &Tensor) -> Result<Tensor> {
        if x.dtype() == dtype && x.is_dense() { Ok(x.clone()) } else { self.copied(dtype, x) }
    }

    /// Zeroes a dense tensor. The work must hold its memory.
    pub(crate) fn zero(&mut self, x: &Tensor) -> Result<()> {
        let bytes = x.span() * bytes_of(x.dtype());
        let (at, npu) = (x.address() as *mut c_void, self.npu());
        // SAFETY: the work holds the memory that contains the range until it is done.
        npu.check(unsafe { npu.library.acl.aclrtMemsetAsync(at, bytes, 0, bytes, self.stream()) })
    }
}

/// Calls an operator: creates handles for the tensor arguments, and runs both phases. Does nothing if `idle`
/// is true, which means that the operator would write no elements.
macro_rules! operator {
    ($work:expr, $idle:expr, $operator:ident, $phase:ident, [$($tensor:ident),*], ($($argument:expr),*)) => {{
        if $idle {
            return Ok(());
        }
        let npu = $work.npu();
        $(let $tensor = $tensor.handle(npu)?;)*
        $work.operator(
            stringify!($operator),
            // SAFETY: the handles are alive; `bytes` and `executor` are valid for writes.
            &|operators, bytes, executor| unsafe { operators.$phase($($argument,)* bytes, executor) },
            // SAFETY: the executor comes from the first phase, and the workspace has the size that this phase
            // requested.
            &|operators, workspace, bytes, executor, stream| unsafe {
                operators.$operator(workspace, bytes, executor, stream)
            },
        )
    }};
}

/// Defines methods for operators whose arguments are all tensors. The result is the last argument.
macro_rules! of_tensors {
    ($($(#[$doc:meta])* $method:ident($($tensor:ident),*) = $operator:ident / $phase:ident;)*) => {
        impl Work<'_> {$(
            $(#[$doc])*
            pub(crate) fn $method(&mut self, $($tensor: &Tensor),*) -> Result<()> {
                let idle = [$($tensor.is_empty()),*].contains(&true);
                operator!(self, idle, $operator, $phase, [$($tensor),*], ($($tensor.raw()),*))
            }
        )*}
    };
}

of_tensors! {
    /// `out = a · b`, with axes of extent 1 broadcast.
    mul(a, b, out) = aclnnMul / aclnnMulGetWorkspaceSize;
    /// `out = a / b`, with axes of extent 1 broadcast.
    div(a, b, out) = aclnnDiv / aclnnDivGetWorkspaceSize;
    /// `out = max(a, b)`, with axes of extent 1 broadcast.
    maximum(a, b, out) = aclnnMaximum / aclnnMaximumGetWorkspaceSize;
    /// `out = eˣ`.
    exp(x, out) = aclnnExp / aclnnExpGetWorkspaceSize;
    /// `out = ln x`.
    log(x, out) = aclnnLog / aclnnLogGetWorkspaceSize;
    /// `out = x · sigmoid(x)`.
    silu(x, out) = aclnnSilu / aclnnSiluGetWorkspaceSize;
    /// `out = x`, rounded to the nearest integer, ties to even.
    round(x, out) = aclnnRound / aclnnRoundGetWorkspaceSize;
    /// `out = tanh x`.
    tanh(x, out) = aclnnTanh / aclnnTanhGetWorkspaceSize;
}

impl Work<'_> {
    /// `out = a + b`, with axes of extent 1 broadcast.
    pub(crate) fn add(&mut self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        let one = HostScalar::new(self.npu(), 1.0)?;
        operator!(
            self,
            out.is_empty(),
            aclnnAdd,
            aclnnAddGetWorkspaceSize,
            [a, b, out],
            (a.raw(), b.raw(), one.raw, out.raw())
        )
    }

    /// `out = a − b`, with axes of extent 1 broadcast.
    pub(crate) fn sub(&mut self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        let one = HostScalar::new(self.npu(), 1.0)?;
        operator!(
            self,
            out.is_empty(),
            aclnnSub,
            aclnnSubGetWorkspaceSize,
            [a, b, out],
            (a.raw(), b.raw(), one.raw, out.raw())
        )
    }

    /// `out = factor · x`.
    pub(crate) fn scale(&mut self, x: &Tensor, factor: f32, out: &Tensor) -> Result<()> {
        let factor = HostScalar::new(self.npu(), factor)?;
        operator!(
            self,
            out.is_empty(),
            aclnnMuls,
            aclnnMulsGetWorkspaceSize,
            [x, out],
            (x.raw(), factor.raw, out.raw())
        )
    }

    /// `out = min(max(x, least), most)`. NaN stays NaN.
    pub(crate) fn clamp(&mut self, x: &Tensor, least: f32, most: f32, out: &Tensor) -> Result<()> {
        let (least, most) = (HostScalar::new(self.npu(), least)?, HostScalar::new(self.npu(), most)?);
        operator!(
            self,
            out.is_empty(),
            aclnnClamp,
            aclnnClampGetWorkspaceSize,
            [x, out],
            (x.raw(), least.raw, most.raw, out.raw())
        )
    }

    /// Copies `x` to `out`, converted to `out`'s element type. A copy to the same type keeps the bits.
    pub(crate) fn convert(&mut self, x: &Tensor, out: &Tensor) -> Result<()> {
        let dtype = out.dtype();
        if x.dtype() == dtype {
            return operator!(
                self,
                out.is_empty(),
                aclnnInplaceCopy,
                aclnnInplaceCopyGetWorkspaceSize,
                [out, x],
                (out.raw(), x.raw())
            );
        }
        operator!(
            self,
            out.is_empty(),
            aclnnCast,
            aclnnCastGetWorkspaceSize,
            [x, out],
            (x.raw(), dtype, out.raw())
        )
    }

    /// `out[i] = rows[index[i]]`, where `rows` is a dense matrix.
    pub(crate) fn take_rows(&mut self, rows: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
        operator!(
            self,
            out.is_empty(),
            aclnnIndexSelect,
            aclnnIndexSelectGetWorkspaceSize,
            [rows, index, out],
            (rows.raw(), 0, index.raw(), out.raw())
        )
    }

    /// `rows[index[i]] = x[i]`, where `rows` is a dense matrix. All other rows stay unchanged.
    pub(crate) fn put_rows(&mut self, rows: &Tensor, index: &Tensor, x: &Tensor) -> Result<()> {
        operator!(
            self,
            x.is_empty(),
            aclnnInplaceIndexCopy,
            aclnnInplaceIndexCopyGetWorkspaceSize,
            [rows, index, x],
            (rows.raw(), 0, index.raw(), x.raw())
        )
    }

    /// `out` = the maximum along the last axis, whose extent in `out` is 1.
    pub(crate) fn greatest(&mut self, x: &Tensor, out: &Tensor) -> Result<()> {
        let last = NumberList::new(self.npu(), &[-1])?;
        operator!(
            self,
            out.is_empty(),
            aclnnAmax,
            aclnnAmaxGetWorkspaceSize,
            [x, out],
            (x.raw(), last.raw, true, out.raw())
        )
    }

    /// `out` = the sum along the last axis, whose extent in `out` is 1.
    pub(crate) fn sum(&mut self, x: &Tensor, out: &Tensor) -> Result<()> {
        let (last, dtype) = (NumberList::new(self.npu(), &[-1])?, out.dtype());
        operator!(
            self,
            out.is_empty(),
            aclnnReduceSum,
            aclnnReduceSumGetWorkspaceSize,
            [x, out],
            (x.raw(), last.raw, true, dtype, out.raw())
        )
    }

    /// `out[i] = a[i] · b[i]`, a batch of matrix products: `[n, rows, inner]` by `[n, inner, columns]`.
    pub(crate) fn multiply(&mut self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        operator!(
            self,
            out.is_empty(),
            aclnnBatchMatMul,
            aclnnBatchMatMulGetWorkspaceSize,
            [a, b, out],
            (a.raw(), b.raw(), out.raw(), KEEP_TYPES)
        )
    }

    /// `out = a · b`, `[rows, inner]` by `[inner, columns]`.
    pub(crate) fn multiply_one(&mut self, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
        operator!(
            self,
            out.is_empty(),
            aclnnMatmul,
            aclnnMatmulGetWorkspaceSize,
            [a, b, out],
            (a.raw(), b.raw(), out.raw(), KEEP_TYPES)
        )
    }

    /// `out = x / √(mean(x²) + eps) · gamma` over the last axis. Writes each row's `1 / √(mean(x²) + eps)` to
    /// `deviations`.
    pub(crate) fn rms_norm(
        &mut self,
        x: &Tensor,
        gamma: &Tensor,
        eps: f32,
        out: &Tensor,
        deviations: &Tensor,
    ) -> Result<()> {
        operator!(
            self,
            out.is_empty(),
            aclnnRmsNorm,
            aclnnRmsNormGetWorkspaceSize,
            [x, gamma, out, deviations],
            (x.raw(), gamma.raw(), f64::from(eps), out.raw(), deviations.raw())
        )
    }
}
