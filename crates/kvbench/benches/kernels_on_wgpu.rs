//! Kernels of the wgpu backend against the queue's own copy of as many bytes, `copy_buffer_to_buffer`, on the same
//! adapter. Both are submitted and waited for; a kernel and its limit take turns.
//!
//! `--mib N` sets the largest size of each side (default 64), `--context N` the longest context of a decode step
//! (default 16,384).
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;

use kvbackend_wgpu::WgpuBackend;
use kvbackend_wgpu::wgpu::{Buffer, BufferDescriptor, BufferUsages, CommandEncoderDescriptor, PollType};
use kvbench::lab::{DIM, HEADS, Lab};
use kvbench::{in_turns, option, row};
use kvcore::kernels::{Dequantize, Quantize};
use kvcore::{BlockId, DType, KvFormat, Result};

/// A copy of bytes on the device.
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

/// One row of the table: `work` is enqueued, and moves `bytes` bytes.
fn report(lab: &Lab, limit: &Limit, what: &str, bytes: usize, work: impl Fn() -> Result<()>) {
    let mut both = || {
        work().expect("an operation");
        lab.stream.synchronize().expect("a device that goes on");
    };
    let [seconds, limit] = in_turns([&mut both, &mut || limit.run()]);
    row(&format!("wgpu: {what}"), bytes, seconds, "copy_buffer_to_buffer", limit);
}

fn movement(backend: &Arc<WgpuBackend>, dtype: DType, mib: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * dtype.bits() / 8);
    let lab = Lab::on(Arc::clone(backend) as _, dtype, HEADS, tokens)?;
    let (stream, both) = (&lab.stream, lab.bytes());
    let limit = Limit::new(backend, both);
    let (scatter, gather, copy, rotate) =
        (lab.scatter()?, lab.gather()?, lab.copy_blocks(), lab.rotate_keys());
    // To what moves bytes as they are, f16 is bf16.
    if dtype != DType::F16 {
        report(&lab, &limit, &format!("scatter {dtype}"), both, || stream.scatter(&scatter));
        report(&lab, &limit, &format!("gather {dtype}"), both, || stream.gather(&gather));
        report(&lab, &limit, &format!("copy_blocks {dtype}"), both, || stream.copy_blocks(&copy));
    }
    let what = format!("rotate_keys (K rotated, V copied) {dtype}");
    report(&lab, &limit, &what, both, || stream.rotate_keys(&rotate));
    let (rope, half) = (lab.rope()?, Limit::new(backend, both / 2));
    report(&lab, &half, &format!("rope {dtype}"), both / 2, || stream.rope(&rope));
    Ok(())
}

/// Blocks into a format of fewer bits and back. The bytes are those of the dense side.
fn formats(backend: &Arc<WgpuBackend>, mib: usize) -> Result<()> {
    let tokens = (mib << 20) / (2 * HEADS * DIM * 2);
    let lab = Lab::on(Arc::clone(backend) as _, DType::BF16, HEADS, tokens)?;
    let blocks = lab.arena.layout().shape().num_blocks / 2;
    let limit = Limit::new(backend, lab.bytes());
    let pairs: Arc<[_]> = (0..blocks as u32).map(|i| (BlockId(i), BlockId(i))).collect();
    for format in ["int8", "int4", "fp8-e4m3"] {
        let format: KvFormat = format.parse()?;
        let small = kvbench::lab::arena(lab.backend.as_ref(), format, blocks)?;
        let quantize = Quantize { src: lab.arena.clone(), dst: small.clone(), pairs: Arc::clone(&pairs) };
        let back = Dequantize { src: small, dst: lab.arena.clone(), pairs: Arc::clone(&pairs) };
        report(&lab, &limit, &format!("quantize, bf16 to {format}"), lab.bytes(), || {
            lab.stream.quantize(&quantize)
        });
        report(&lab, &limit, &format!("dequantize, {format} to bf16"), lab.bytes(), || {
            lab.stream.dequantize(&back)
        });
    }
    Ok(())
}

/// A step of decoding reads all of K and V once.
fn decode(backend: &Arc<WgpuBackend>, dtype: DType, context: usize) -> Result<()> {
    let lab = Lab::on(Arc::clone(backend) as _, dtype, HEADS, context)?;
    let (op, limit) = (lab.attend(1, true)?, Limit::new(backend, lab.bytes()));
    report(&lab, &limit, &format!("attend, decode, GQA 4, {dtype}"), lab.bytes(), || lab.stream.attend(&op));
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
        }
    }
    for size in [mib / 4, mib / 2, mib].map(|size| size.max(1)) {
        formats(&backend, size)?;
    }
    Ok(())
}
