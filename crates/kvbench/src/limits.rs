//! What kernels are held against: by threads that stand ready, so that none is started inside a measurement, and in
//! memory from the backend's own allocator, so that pages are of the same size.

use std::hint::black_box;

use kvbackend_cpu::CpuStorage;
use kvcore::{MemoryKind, Storage};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

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

/// A plain copy.
#[allow(missing_debug_implementations, reason = "a benchmark prints times")]
pub struct Memcpy {
    src: Memory,
    dst: Memory,
    part: usize,
    /// None for one thread.
    pool: Option<ThreadPool>,
}

impl Memcpy {
    /// `threads` threads that each copy their part of `bytes` bytes.
    pub fn new(bytes: usize, threads: usize) -> Self {
        let (mut src, dst) = (Memory::new(bytes), Memory::new(bytes));
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

/// A read of every byte: the least that one decode step must do.
#[allow(missing_debug_implementations, reason = "a benchmark prints times")]
pub struct StreamingRead {
    src: Memory,
    pool: ThreadPool,
}

impl StreamingRead {
    /// `threads` threads that add up `bytes` bytes.
    pub fn new(bytes: usize, threads: usize) -> Self {
        let mut src = Memory::new(bytes);
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
