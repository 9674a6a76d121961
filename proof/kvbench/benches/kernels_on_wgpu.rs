//! Compares kernels of the wgpu backend with the queue's own copy of the same number of bytes,
//! `copy_buffer_to_buffer`, on the same adapter. Each is submitted and waited for. A kernel and its limit
//! take turns.
//!
//! `--mib N` sets the maximum size of each side (default 64). `--context N` sets the longest context of a
//! decode step (default 16,384), which is 32 times the longest prefill.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;

use kvbackend_wgpu::WgpuBackend;
use kvbackend_wgpu::wgpu::{Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor, PollType};
use kvbench::lab::{self, DIM, HEADS, Lab};
use kvbench::{in_turns, option, row};
use kvcore::{
    BlockId, CopyTensor, DType, Dequantize, KvFormat, MemoryKind, Quantize, Result, Stream, WritePairs,
    allocate_tensor,
};

/// A copy of bytes within the device.
struct Limit {
    backend: Arc<WgpuBackend>,
    src: Buffer,
    dst: Buffer,
}

impl Limit {
    fn new(backend: &Arc<WgpuBackend>, bytes: usize) -> Self {
        let make = || {
            backend.device().create_buffer(&BufferDescriptor {
                label: None,
                size: bytes as u64,
                usage: BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        };
        Self { backend: Arc::clone(backend), src: make(), dst: make() }
    }

    fn run(&self) {
        let mut encoder = self.backend.device().create_command_encoder(&CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&self.src, 0, &self.dst, 0, None);
        self.backend.queue().submit([encoder.finish()]);
        self.backend.device().poll(PollType::wait_indefinitely()).expect("a device that goes on");
    }
}

/// Prints one row of the table. `work` is enqueued, and must move `bytes` bytes.
fn report(stream: &dyn Stream, limit: &Limit, what: &str, bytes: usize, work: impl Fn() -> Result<()>) {
    let mut both = || {
        work().expect("an operation");
        stream.synchronize().expect("a device that goes on");
    };
    let [seconds, limit] = in_turns([&mut both, &mut || limit.run()]);
    row(&format!("wgpu: {what}"), bytes, seconds, "copy_buffer_to_buffer", limit);
}

fn movement(backend: &Arc<WgpuBackend>, dtype: DType, mib: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * dtype.bits() / 8);
    let lab = Lab::on(Arc::clone(backend) as _, dtype, HEADS, tokens)?;
    let (stream, both) = (lab.stream.as_ref(), lab.bytes());
    let limit = Limit::new(backend, both);
    let (scatter, gather) = (lab.scatter()?, lab.gather()?);
    let (copy, swap, rotate) = (lab.copy_blocks(), lab.swap_blocks()?, lab.rotate_keys());
    // Moving f16 is the same work as moving bf16.
    if dtype != DType::F16 {
        report(stream, &limit, &format!("scatter {dtype}"), both, || stream.scatter(&scatter));
        report(stream, &limit, &format!("gather {dtype}"), both, || stream.gather(&gather));
        report(stream, &limit, &format!("copy_blocks {dtype}"), both, || stream.copy_blocks(&copy));
        report(stream, &limit, &format!("swap_blocks {dtype}"), both, || stream.swap_blocks(&swap));
    }
    let what = format!("rotate_keys (K rotated, V copied) {dtype}");
    report(stream, &limit, &what, both, || stream.rotate_keys(&rotate));
    let (rope, half) = (lab.rope()?, Limit::new(backend, both / 2));
    report(stream, &half, &format!("rope {dtype}"), both / 2, || stream.rope(&rope));
    if dtype != DType::F16 {
        let src = rope.rows.permute(&[1, 0, 2])?;
        let dst = allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, dtype, src.shape())?;
        let copy = CopyTensor { src, dst };
        let what = format!("copy_tensor (heads before tokens) {dtype}");
        report(stream, &half, &what, both / 2, || stream.copy_tensor(&copy));
    }
    Ok(())
}

/// Measures converting blocks to a format with fewer bits, and back. Counts the bytes on the dense side.
fn formats(backend: &Arc<WgpuBackend>, mib: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * 2);
    let lab = Lab::on(Arc::clone(backend) as _, DType::BF16, HEADS, tokens)?;
    let blocks = lab.arena.layout().shape().num_blocks / 2;
    let limit = Limit::new(backend, lab.bytes());
    let pairs: Arc<[_]> = (0..blocks as u32).map(|i| (BlockId(i), BlockId(i))).collect();
    for format in ["int8", "int4", "fp8-e4m3"] {
        let format: KvFormat = format.parse()?;
        let small = kvbench::lab::arena(lab.backend.as_ref(), format, blocks)?;
        let quantize = Quantize {
            src: lab.arena.clone(),
            dst: small.clone(),
            pairs: WritePairs::unchecked(Arc::clone(&pairs)),
        };
        let back = Dequantize {
            src: small,
            dst: lab.arena.clone(),
            pairs: WritePairs::unchecked(Arc::clone(&pairs)),
        };
        let (stream, bytes) = (lab.stream.as_ref(), lab.bytes());
        let what = format!("quantize, bf16 to {format}");
        report(stream, &limit, &what, bytes, || stream.quantize(&quantize));
        let what = format!("dequantize, {format} to bf16");
        report(stream, &limit, &what, bytes, || stream.dequantize(&back));
    }
    Ok(())
}

/// Measures a decode step, which reads all of K and V once.
fn decode(backend: &Arc<WgpuBackend>, dtype: DType, context: usize) -> Result<()> {
    let lab = Lab::on(Arc::clone(backend) as _, dtype, HEADS, context)?;
    let (op, stream, bytes) = (lab.attend(1, true)?, lab.stream.as_ref(), lab.bytes());
    let what = format!("attend, decode, GQA 4, {dtype}");
    report(stream, &Limit::new(backend, bytes), &what, bytes, || stream.attend(&op));
    let (op, bytes) = lab::attend_mla(backend.as_ref(), dtype, context)?;
    let what = format!("attend_mla, decode, 16 heads, {dtype}");
    report(stream, &Limit::new(backend, bytes), &what, bytes, || stream.attend_mla(&op));
    Ok(())
}

/// Measures a prompt whose tokens attend to all tokens before them. Arithmetic dominates, so the copy is only
/// a reference, not a limit.
fn prefill(backend: &Arc<WgpuBackend>, dtype: DType, tokens: usize) -> Result<()> {
    let lab = Lab::on(Arc::clone(backend) as _, dtype, HEADS, tokens)?;
    let (op, stream, bytes) = (lab.attend(lab.tokens, true)?, lab.stream.as_ref(), lab.bytes());
    let what = format!("attend, prefill, GQA 4, {dtype}");
    report(stream, &Limit::new(backend, bytes), &what, bytes, || stream.attend(&op));
    Ok(())
}

fn main() -> Result<()> {
    let backend = WgpuBackend::new()?;
    eprintln!("on {}", backend.device().adapter_info().name);
    let (mib, context) = (option("--mib", 64), option("--context", 16 * 1024));
    for dtype in DType::COMPUTE {
        for size in [mib / 4, mib / 2, mib].map(|size| size.max(1)) {
            movement(&backend, dtype, size)?;
        }
        for context in [context / 4, context / 2, context] {
            decode(&backend, dtype, context)?;
            prefill(&backend, dtype, context / 32)?;
        }
    }
    for size in [mib / 4, mib / 2, mib].map(|size| size.max(1)) {
        formats(&backend, size)?;
    }
    Ok(())
}
