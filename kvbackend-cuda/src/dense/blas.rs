//! cuBLAS, loaded at run time.

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::cublas::sys::{
    self, cublasComputeType_t, cublasGemmAlgo_t, cublasHandle_t, cublasOperation_t, cublasStatus_t,
    cudaDataType,
};
use cudarc::driver::sys::CUstream;
use kvcore::{Error, Result};

use crate::device::CudaDevice;
use crate::driver::{NAME, no_device};

/// Size of the workspace in bytes. cuBLAS recommends this size for compute capability 9.0, and at most this
/// size for other GPUs.
pub(super) const WORKSPACE: usize = 32 << 20;

/// A cuBLAS handle on one stream.
pub(super) struct Blas {
    handle: cublasHandle_t,
    /// Address of the workspace, or 0 before the first product.
    workspace: u64,
    device: Arc<CudaDevice>,
}

// SAFETY: a handle may be used from any thread, but only by one at a time; the lock around it ensures that.
unsafe impl Send for Blas {}

/// A matrix in a product: its address and its element type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    address: u64,
    half: bool,
}

impl Operand {
    pub(super) fn f32(address: u64) -> Self {
        Self { address, half: false }
    }

    pub(super) fn bf16(address: u64) -> Self {
        Self { address, half: true }
    }

    fn dtype(self) -> cudaDataType {
        if self.half { cudaDataType::CUDA_R_16BF } else { cudaDataType::CUDA_R_32F }
    }
}

/// `out = x · matrixᵀ + beta · out`, for `x [rows, width]` and `matrix [outputs, width]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gemm {
    pub(super) matrix: Operand,
    pub(super) x: Operand,
    pub(super) out: u64,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) outputs: usize,
    /// Stride between rows of `x`, in elements.
    pub(super) stride: usize,
    pub(super) beta: f32,
}

fn extent(n: usize) -> Result<c_int> {
    c_int::try_from(n).map_err(|_| Error::Overflow { what: "extents of a matrix product" })
}

impl Blas {
    pub(super) fn new(device: &Arc<CudaDevice>, stream: CUstream) -> Result<Self> {
        // SAFETY: loading a library runs its initialisers; cuBLAS's have no other effect.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_device(
                "cuBLAS (libcublas.so.13 or .12, cublas64) was not found; add its folder to LD_LIBRARY_PATH: \
                 /usr/local/cuda/lib64 if the CUDA toolkit is installed, or nvidia/cu13/lib in the wheel nvidia-cublas"
                    .to_owned(),
            ));
        }
        let _bound = device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is valid for writes.
        check(unsafe { sys::cublasCreate_v2(&raw mut handle) })?;
        let blas = Self { handle, workspace: 0, device: Arc::clone(device) };
        // SAFETY: the handle was just created, and the stream is alive.
        check(unsafe { sys::cublasSetStream_v2(handle, stream.cast()) })?;
        Ok(blas)
    }

    /// Sets the address of a workspace of [`WORKSPACE`] bytes. The caller must hold this memory until the
    /// products that use it are done. The device's context must be current.
    pub(super) fn work_in(&mut self, address: u64) -> Result<()> {
        // Decision: docs/decisions/backend-cuda.md#cublas-gets-an-explicit-workspace-for-each-product
        if self.workspace != address {
            // SAFETY: the handle is alive, and the caller holds the memory until the products that use it are
            // done.
            check(unsafe { sys::cublasSetWorkspace_v2(self.handle, address as *mut _, WORKSPACE) })?;
            self.workspace = address;
        }
        Ok(())
    }

    /// Enqueues a matrix product. `apart` is the stride between rows of `out`, in elements. The device's
    /// context must be current.
    pub(super) fn gemm(&self, gemm: &Gemm, apart: usize) -> Result<()> {
        let Gemm { matrix, x, out, rows, width, outputs, stride, beta } = *gemm;
        let (m, n, k) = (extent(outputs)?, extent(rows)?, extent(width)?);
        let (ldx, ldc, alpha) = (extent(stride)?, extent(apart)?, 1.0f32);
        // cuBLAS is column-major, so the matrix operand must be transposed, and the result comes out
        // transposed.
        // SAFETY: the handle is alive, the addresses must point to device matrices of these shapes that live
        // until the product is done, and both factors outlive the call on the host.
        let status = unsafe {
            sys::cublasGemmEx(
                self.handle,
                cublasOperation_t::CUBLAS_OP_T,
                cublasOperation_t::CUBLAS_OP_N,
                m,
                n,
                k,
                (&raw const alpha).cast(),
                matrix.address as *const _,
                matrix.dtype(),
                k,
                x.address as *const _,
                x.dtype(),
                ldx,
                (&raw const beta).cast(),
                out as *mut _,
                cudaDataType::CUDA_R_32F,
                ldc,
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        check(status)
    }

    /// Enqueues one product per head: `[rows, heads, a]` with `[heads, a, b]`, or with `[heads, b, a]` if
    /// `transposed` is true. `row` and `head` are the strides of the first operand, in elements. The
    /// matrices and the result must be dense. The device's context must be current.
    pub(super) fn by_head(
        &self,
        (rows, heads, a, b): (usize, usize, usize, usize),
        (row, head): (usize, usize),
        (x, matrices, out): (u64, u64, u64),
        transposed: bool,
    ) -> Result<()> {
        let (m, n, k, batch) = (extent(b)?, extent(rows)?, extent(a)?, extent(heads)?);
        let (operation, lda) = if transposed {
            (cublasOperation_t::CUBLAS_OP_T, k)
        } else {
            (cublasOperation_t::CUBLAS_OP_N, m)
        };
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the handle is alive, the addresses must point to device matrices of these shapes that live
        // until the product is done, and both factors outlive the call on the host.
        let status = unsafe {
            sys::cublasSgemmStridedBatched(
                self.handle,
                operation,
                cublasOperation_t::CUBLAS_OP_N,
                m,
                n,
                k,
                &raw const one,
                matrices as *const f32,
                lda,
                (a * b) as i64,
                x as *const f32,
                extent(row)?,
                head as i64,
                &raw const zero,
                out as *mut f32,
                extent(heads * b)?,
                b as i64,
                batch,
            )
        };
        check(status)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: the handle is alive, and its stream's work is done.
            let _ = unsafe { sys::cublasDestroy_v2(self.handle) };
        }
    }
}

fn check(status: cublasStatus_t) -> Result<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        refused => {
            Err(Error::Device { backend: NAME, reason: format!("cuBLAS refused a call: {refused:?}") })
        }
    }
}
