//! The calls whose instructions are counted. `cargo xtask instructions` runs them and compares the counts
//! with `proof/kvbench/instructions/baseline.json`.
//!
//! Each function returns its argument, so dropping it is not counted.

use gungraun::prelude::*;
use instructions::{ChunkReuse, HotKernel, Keys, PoolPath};
use kvcore::DType;

#[library_benchmark]
#[bench::blocks_128(PoolPath::new(), 128)]
#[bench::block_1(PoolPath::new(), 1)]
fn pool_alloc_free(pool: PoolPath, n: usize) -> PoolPath {
    pool.alloc_free(n);
    pool
}

#[library_benchmark]
#[bench::blocks_128(PoolPath::new())]
fn prefix_hit(pool: PoolPath) -> PoolPath {
    pool.hit();
    pool
}

#[library_benchmark]
#[bench::tokens_8192(Keys::new())]
fn blake3_chain(keys: Keys) -> Keys {
    keys.chain();
    keys
}

#[library_benchmark]
#[bench::tokens_4096(ChunkReuse::new())]
fn chunk_reuse(chunk: ChunkReuse) -> ChunkReuse {
    chunk.run();
    chunk
}

#[library_benchmark]
#[bench::scatter_bf16(HotKernel::scatter(DType::BF16))]
#[bench::gather_bf16(HotKernel::gather(DType::BF16))]
#[bench::copy_blocks_bf16(HotKernel::copy_blocks(DType::BF16))]
#[bench::rope_bf16(HotKernel::rope(DType::BF16))]
#[bench::rope_f32(HotKernel::rope(DType::F32))]
#[bench::rotate_keys_bf16(HotKernel::rotate_keys(DType::BF16))]
#[bench::attend_decode_bf16(HotKernel::attend(DType::BF16, 1))]
#[bench::attend_decode_f32(HotKernel::attend(DType::F32, 1))]
#[bench::attend_prefill_bf16(HotKernel::attend(DType::BF16, 64))]
#[bench::attend_prefill_f32(HotKernel::attend(DType::F32, 64))]
#[bench::attend_mass_bf16(HotKernel::attend_mass(DType::BF16))]
#[bench::attend_mass_f32(HotKernel::attend_mass(DType::F32))]
fn kernel(kernel: HotKernel) -> HotKernel {
    kernel.run();
    kernel
}

library_benchmark_group!(
    name = hot_paths,
    benchmarks = [pool_alloc_free, prefix_hit, blake3_chain, chunk_reuse, kernel]
);
main!(library_benchmark_groups = hot_paths);
