//! Limits that kernels are compared with. Their threads start before a measurement. Their memory comes from
//! the backend's own allocator, so it has the same page size.

use std::hint::black_box;

use kvbackend_cpu::CpuStorage;
use kvcore::{MemoryKind, Storage};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Creates a pool of `threads` threads.
pub fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

/// Memory allocated in the same way as the backend's.
struct BenchMemory(CpuStorage);

impl BenchMemory {
    fn new(bytes: usize) -> Self {
        Self(CpuStorage::allocate(MemoryKind::Device, bytes).expect("memory"))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the storage has `len` initialised bytes at `address`, which live as long as `self`. Only
        // `BenchMemory` can reach the storage, so `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.0.address() as *mut u8, self.0.len()) }
    }
}

/// A plain copy of bytes.
#[allow(missing_debug_implementations, reason = "a benchmark prints times")]
pub struct Memcpy {
    src: BenchMemory,
    dst: BenchMemory,
    part: usize,
    /// The threads that copy; `None` for one thread.
    pool: Option<ThreadPool>,
}

impl Memcpy {
    /// Creates a copy of `bytes` bytes, split evenly between `threads` threads.
    pub fn new(bytes: usize, threads: usize) -> Self {
        let (mut src, dst) = (BenchMemory::new(bytes), BenchMemory::new(bytes));
        src.bytes().fill(1);
        Self { src, dst, part: bytes.div_ceil(threads), pool: (threads > 1).then(|| pool(threads)) }
    }

    /// Copies all bytes once.
    pub fn run(&mut self) {
        let (src, dst, part) = (self.src.bytes(), self.dst.bytes(), self.part);
        let copy = |(to, from): (&mut [u8], &[u8])| black_box(to).copy_from_slice(black_box(from));
        match &self.pool {
            None => copy((dst, src)),
            Some(pool) => {
                pool.install(|| dst.par_chunks_mut(part).zip(src.par_chunks(part)).for_each(copy));
            }
        }
    }
}

/// A read of every byte, the minimum work of one decode step.
#[allow(missing_debug_implementations, reason = "a benchmark prints times")]
pub struct StreamingRead {
    src: BenchMemory,
    pool: ThreadPool,
}

impl StreamingRead {
    /// Creates a read of `bytes` bytes, which `threads` threads add up.
    pub fn new(bytes: usize, threads: usize) -> Self {
        let mut src = BenchMemory::new(bytes);
        src.bytes().fill(1);
        Self { src, pool: pool(threads) }
    }

    /// Reads all bytes once.
    pub fn run(&mut self) {
        let src: &[u64] = bytemuck::cast_slice(self.src.bytes());
        let sum = |part: &[u64]| {
            part.chunks_exact(8).fold([0u64; 8], |mut s, c| {
                s.iter_mut().zip(c).for_each(|(a, b)| *a = a.wrapping_add(*b));
                s
            })
        };
        let sums: Vec<[u64; 8]> = self.pool.install(|| black_box(src).par_chunks(1 << 16).map(sum).collect());
        black_box(sums);
    }
}
