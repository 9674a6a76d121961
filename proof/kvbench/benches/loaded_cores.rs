//! Compares two threads with one while every core is busy with other work: spinning threads, one per core.
//!
//! The row's limit is the same work on one thread under the same load. A ratio below 0.91 means that two
//! threads take more than 1.1 times as long as one. `--load 0` leaves the cores idle; `--seconds N` sets the
//! time per row (default 6).
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use kvbackend_cpu::CpuOptions;
use kvbackend_cpu::dense::{Matrix, Products, StoredType};
use kvbench::lab::Lab;
use kvbench::{option, row};
use kvcore::DType;

/// Threads that spin to keep the cores busy.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn new(threads: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let threads = (0..threads).map(|_| std::thread::spawn(spin(Arc::clone(&stop)))).collect();
        Self { stop, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Returns the mean seconds of each piece of work. They take turns of about a tenth of a second.
fn means(seconds: usize, mut works: [&mut dyn FnMut(); 2]) -> [f64; 2] {
    let (mut total, mut runs) = ([0.0; 2], [0usize; 2]);
    for work in &mut works {
        work();
    }
    while total.iter().sum::<f64>() < seconds as f64 {
        for (i, work) in works.iter_mut().enumerate() {
            let start = Instant::now();
            while start.elapsed().as_secs_f64() < 0.1 {
                work();
                runs[i] += 1;
            }
            total[i] += start.elapsed().as_secs_f64();
        }
    }
    [total[0] / runs[0] as f64, total[1] / runs[1] as f64]
}

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (load, seconds) = (option("--load", cores), option("--seconds", 6));
    let options = [2, 1].map(|threads| CpuOptions { threads: Some(threads), ..CpuOptions::default() });
    let _load = Load::new(load);
    let limit = "one thread";
    for (name, tokens) in [("512", 512), ("8192", 8192)] {
        let labs = options.each_ref().map(|options| Lab::new(DType::BF16, tokens, options).expect("a lab"));
        let [two, one] = labs.each_ref();
        let scatters = labs.each_ref().map(|lab| lab.scatter().expect("a scatter"));
        let [seconds_of_two, seconds_of_one] = means(
            seconds,
            [
                &mut || {
                    two.stream.scatter(&scatters[0]).expect("a scatter");
                },
                &mut || one.stream.scatter(&scatters[1]).expect("a scatter"),
            ],
        );
        row(
            &format!("scatter of {name} tokens, 2 threads"),
            two.bytes(),
            seconds_of_two,
            limit,
            seconds_of_one,
        );
        let attends = labs.each_ref().map(|lab| lab.attend(1, true).expect("an attend"));
        let [seconds_of_two, seconds_of_one] = means(
            seconds,
            [
                &mut || {
                    two.stream.attend(&attends[0]).expect("an attend");
                },
                &mut || one.stream.attend(&attends[1]).expect("an attend"),
            ],
        );
        let what = format!("attend of a row to {name} tokens, 2 threads");
        row(&what, two.bytes(), seconds_of_two, limit, seconds_of_one);
    }
    let (out, input) = (2048, 1024);
    let bytes = vec![0u8; out * input * 2];
    let matrix = Matrix::new(StoredType::BF16, out, input, &bytes).expect("a matrix");
    let [two, one] = options.each_ref().map(|options| Products::with_options(options).expect("products"));
    for rows in [1, 64] {
        let x = vec![0.5f32; rows * input];
        let (mut y, mut z) = (vec![0.0f32; rows * out], vec![0.0f32; rows * out]);
        let [seconds_of_two, seconds_of_one] = means(
            seconds,
            [
                &mut || {
                    two.multiply(&x, &matrix, &mut y).expect("a product");
                },
                &mut || one.multiply(&x, &matrix, &mut z).expect("a product"),
            ],
        );
        let what = format!("product, {rows} {}, bf16, 2 threads", if rows == 1 { "row" } else { "rows" });
        row(&what, bytes.len(), seconds_of_two, limit, seconds_of_one);
    }
    // Jobs like a decode step's: short ones, one after another.
    let labs = options.each_ref().map(|options| Lab::new(DType::BF16, 512, options).expect("a lab"));
    let attends = labs.each_ref().map(|lab| lab.attend(1, true).expect("an attend"));
    let x = vec![0.5f32; input];
    let step = |i: usize, products: &Products| {
        let mut y = vec![0.0f32; out];
        for _ in 0..8 {
            (0..4).for_each(|_| products.multiply(&x, &matrix, &mut y).expect("a product"));
            labs[i].stream.attend(&attends[i]).expect("an attend");
        }
    };
    let [seconds_of_two, seconds_of_one] = means(seconds, [&mut || step(0, &two), &mut || step(1, &one)]);
    let bytes = 8 * (4 * bytes.len() + labs[0].bytes());
    row("32 products and 8 attends of a row, 2 threads", bytes, seconds_of_two, limit, seconds_of_one);
}
