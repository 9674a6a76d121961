//! Measures concurrent operations: a one-row scatter into a layer while another stream attends to another
//! layer, compared with the scatter alone.
//!
//! `--tokens N` sets the number of tokens in the cache (default 32768), `--rows N` the number of rows that
//! attend to it (default 64).
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvbench::lab::Lab;
use kvbench::{option, row};
use kvcore::{
    Backend, DType, KvArena, KvLayout, KvShape, MemoryKind, Scatter, Stream, WriteSlots, allocate_tensor,
};

/// Returns the median and the maximum time of one-row scatters, with pauses between them.
fn scatters(stream: &dyn Stream, scatter: &Scatter, until: impl Fn(usize) -> bool) -> [f64; 2] {
    let mut seconds = Vec::new();
    while !until(seconds.len()) {
        let start = Instant::now();
        stream.scatter(scatter).expect("a scatter");
        seconds.push(start.elapsed().as_secs_f64());
        std::thread::sleep(Duration::from_micros(500));
    }
    seconds.sort_by(f64::total_cmp);
    [seconds[seconds.len() / 2], seconds[seconds.len() - 1]]
}

fn main() {
    let (tokens, rows) = (option("--tokens", 32 << 10), option("--rows", 64));
    // One thread for the attention, one for the scatter.
    let options = CpuOptions { threads: Some(1), ..CpuOptions::default() };
    let lab = Lab::new(DType::BF16, tokens, &options).expect("a lab");
    let shape = KvShape { num_layers: 2, ..lab.arena.layout().shape().clone() };
    let layout = Arc::new(KvLayout::new(shape).expect("a layout"));
    let arena = KvArena::allocate(lab.backend.as_ref(), MemoryKind::Device, layout).expect("an arena");
    let attend =
        kvcore::Attend { arena: arena.clone(), layer: 1, ..lab.attend(rows, true).expect("an attend") };
    let backend = CpuBackend::with_options(&options).expect("a backend");
    let one = || {
        let shape = [1, kvbench::lab::HEADS, kvbench::lab::DIM];
        allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::BF16, &shape).expect("a row")
    };
    let slots = WriteSlots::unchecked([tokens as i64].into_iter().collect::<Arc<[_]>>());
    let scatter = Scatter { arena, layer: 0, k: one(), v: one(), slots, rotation: None };
    let stream = backend.stream().expect("a stream");
    let alone = scatters(stream.as_ref(), &scatter, |count| count >= 1000);
    let (ended, begun) = (AtomicBool::new(false), AtomicBool::new(false));
    let concurrent = std::thread::scope(|scope| {
        let attending = scope.spawn(|| {
            lab.stream.attend(&attend).expect("an attend");
            begun.store(true, Ordering::Release);
            let start = Instant::now();
            for _ in 0..10 {
                lab.stream.attend(&attend).expect("an attend");
            }
            ended.store(true, Ordering::Release);
            start.elapsed().as_secs_f64() / 10.0
        });
        while !begun.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let times = scatters(stream.as_ref(), &scatter, |count| count > 0 && ended.load(Ordering::Acquire));
        let seconds = attending.join().expect("the attention");
        eprintln!("an attend of {rows} rows takes {:.1} ms", 1e3 * seconds);
        times
    });
    let bytes = scatter.k.len() * 4;
    let limit = "the same scatter alone";
    row("one-row scatter beside an attend of another layer, median", bytes, concurrent[0], limit, alone[0]);
    row("one-row scatter beside an attend of another layer, longest", bytes, concurrent[1], limit, alone[1]);
}
