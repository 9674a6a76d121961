//! What kernels are held against: by threads that stand ready, so that none is started inside a measurement, and in
//! memory from the backend's own allocator, so that pages are of the same size.

use std::hint::black_box;

use kvbackend_cpu::CpuStorage;
use kvcore::{MemoryKind, Storage};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::time;

/// Threads that stand ready.
pub fn pool(threads: usize) -> ThreadPool {
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
pub fn memcpy_seconds(bytes: usize, threads: usize) -> f64 {
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
pub fn read_seconds(bytes: usize, threads: usize) -> f64 {
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
