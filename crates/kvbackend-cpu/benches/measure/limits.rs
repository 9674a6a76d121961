//! What kernels are held against: by threads that stand ready, so that none is started inside a measurement, and in
//! memory from the backend's own allocator, so that pages are of the same size.
#![allow(dead_code, reason = "each benchmark uses its part")]

use std::hint::black_box;

use gemm::Parallelism;
use kvbackend_cpu::CpuStorage;
use kvcore::{MemoryKind, Storage};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::time;

fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

/// Bytes as the backend allocates them.
struct Memory(CpuStorage);

impl Memory {
    fn new(bytes: usize) -> Self {
        Self(CpuStorage::allocate(MemoryKind::Device, bytes).expect("memory"))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the storage has as many initialised bytes at its address, lives as long as `self`, and is known to
        // nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.0.address() as *mut u8, self.0.len()) }
    }
}

/// Seconds for which `threads` threads copy `bytes` bytes, each its part.
pub(crate) fn memcpy_seconds(bytes: usize, threads: usize) -> f64 {
    let (mut src, mut dst) = (Memory::new(bytes), Memory::new(bytes));
    let (src, dst) = (src.bytes(), dst.bytes());
    src.fill(1);
    let part = bytes.div_ceil(threads);
    let copy = |(to, from): (&mut [u8], &[u8])| black_box(to).copy_from_slice(black_box(from));
    if threads == 1 {
        return time(|| copy((dst, src)));
    }
    let pool = pool(threads);
    time(|| pool.install(|| dst.par_chunks_mut(part).zip(src.par_chunks(part)).for_each(copy)))
}

/// Seconds for which `threads` threads read `bytes` bytes: the least that one decode step must do.
pub(crate) fn read_seconds(bytes: usize, threads: usize) -> f64 {
    let (mut src, pool) = (Memory::new(bytes), pool(threads));
    src.bytes().fill(1);
    let src: &[u64] = bytemuck::cast_slice(src.bytes());
    let sum = |part: &[u64]| {
        part.chunks_exact(8).fold([0u64; 8], |mut s, c| {
            s.iter_mut().zip(c).for_each(|(a, b)| *a = a.wrapping_add(*b));
            s
        })
    };
    time(|| {
        let sums: Vec<[u64; 8]> = pool.install(|| black_box(src).par_chunks(1 << 16).map(sum).collect());
        black_box(sums);
    })
}

/// Seconds of a product of square matrices of f32 on `threads` threads, for as many operations as `flops`.
pub(crate) fn gemm_seconds(flops: f64, threads: usize) -> f64 {
    const N: usize = 1024;
    let (a, b, mut c) = (vec![1.0f32; N * N], vec![1.0f32; N * N], vec![0.0f32; N * N]);
    let (pool, column) = (pool(threads), N as isize);
    let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    let seconds = time(|| {
        pool.install(|| {
            // SAFETY: each matrix has N rows of N elements, and the result is apart from what is read.
            unsafe {
                gemm::gemm(
                    N,
                    N,
                    N,
                    c.as_mut_ptr(),
                    1,
                    column,
                    false,
                    a.as_ptr(),
                    1,
                    column,
                    b.as_ptr(),
                    1,
                    column,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
        });
        black_box(&mut c);
    });
    seconds * flops / (2.0 * (N * N * N) as f64)
}
