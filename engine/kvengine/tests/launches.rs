//! The launches of a whole model, as recorded by a test double of the driver: a hit copies nothing, a decode
//! step takes a fixed number of launches, and replaying it takes one launch.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::ffi::{CStr, c_char};
use std::path::Path;
use std::sync::Arc;

use kvbackend_cuda::CudaBackend;
use kvchunk::{ChunkedPrompt, ReuseCell};
use kvcore::Backend;
use kvengine::{Engine, EngineConfig, PromptTokens, Request};
use kvmodel::dense::CudaDense;
use kvmodel::{Model, ModelConfig, Observer, WeightFormat, Weights};
use libloading::Library;

#[path = "suite/batch.rs"]
mod batch;

/// The test double's record of the queued operations.
struct Trace(Library);

impl Trace {
    /// Returns the record. If another driver is loaded, prints a message and returns `None`.
    fn find() -> Option<Self> {
        // SAFETY: the backend loads the same library; its initialisers have no other effect.
        let library = unsafe { Library::new("libcuda.so.1") }.ok();
        let known = |library: &Library| {
            // SAFETY: the symbol is only looked up, and not called.
            unsafe { library.get::<fn()>(b"kv_double_trace\0") }.is_ok()
        };
        let found = library.filter(known).map(Self);
        if found.is_none() {
            kvconform::skip("the test needs the double of the driver");
        }
        found
    }

    /// Returns the kinds and names of the operations that were queued since the last call.
    fn take(&self) -> Vec<Vec<String>> {
        // SAFETY: the driver's double exports this function with this type.
        let call = unsafe {
            self.0.get::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(b"kv_double_trace\0").unwrap()
        };
        let mut buffer = vec![0u8; 1 << 20];
        // SAFETY: the pointer and the length describe the same buffer, which outlives the call.
        let needed = unsafe { call(buffer.as_mut_ptr().cast(), buffer.len()) };
        assert!(needed <= buffer.len());
        let text = CStr::from_bytes_until_nul(&buffer).unwrap().to_string_lossy();
        text.lines().map(|line| line.split_whitespace().skip(2).map(str::to_owned).collect()).collect()
    }
}

/// An observer that takes the record of each token's step.
struct Steps<'a> {
    trace: &'a Trace,
    taken: Vec<Vec<Vec<String>>>,
}

impl Observer for Steps<'_> {
    fn token(&mut self, _: u32) -> std::ops::ControlFlow<()> {
        self.taken.push(self.trace.take());
        std::ops::ControlFlow::Continue(())
    }
}

fn model(backend: &Arc<CudaBackend>) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvmodel/tests/goldens/llama");
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&config).unwrap();
    config.eos.clear();
    let weights = Weights::from_directory(&folder, &mut |_, _| ()).unwrap();
    let dense = Arc::new(CudaDense::new(backend).unwrap());
    Model::with_dense(config, weights, WeightFormat::Stored, dense).unwrap()
}

fn engine(backend: Arc<CudaBackend>, graphs: usize) -> Engine {
    let model = model(&backend);
    let config = EngineConfig { block_size: 4, graphs, ..EngineConfig::default() };
    Engine::new(model, backend, b"none", &config).unwrap()
}

fn request(chunks: &[Vec<u32>]) -> Request {
    let prompt = ChunkedPrompt::new(vec![1, 2, 3, 4], chunks.to_vec(), vec![5, 6, 7]).unwrap();
    // With this cell, chunks are used at other positions than they were computed at.
    Request {
        max_new_tokens: 8,
        cell: ReuseCell::SEQUENTIAL_ALONE,
        ..Request::new(PromptTokens::Chunked(prompt))
    }
}

fn queued<'a>(step: &'a [Vec<String>], kind: &str) -> Vec<&'a str> {
    step.iter().filter(|line| line[0] == kind).map(|line| line.get(1).map_or("", String::as_str)).collect()
}

/// There is only one test, because the record covers the whole process.
#[test]
fn hits_copy_nothing_and_decode_steps_are_one_launch() {
    let Some(trace) = Trace::find() else { return };
    let chunks: Vec<Vec<u32>> = (0..6u32).map(|i| (0..8).map(|j| (i * 8 + j) % 48).collect()).collect();
    let turned: Vec<Vec<u32>> = chunks.iter().rev().cloned().collect();
    let run = |engine: &mut Engine, request: &Request| {
        trace.take();
        let mut steps = Steps { trace: &trace, taken: Vec::new() };
        let generation = engine.generate(request, &mut steps).unwrap();
        (generation, steps.taken)
    };

    let backend = kvbackend_cuda::CudaBackend::new().unwrap();
    let mut eager = engine(backend.clone(), 0);
    run(&mut eager, &request(&chunks));
    let before = backend.counters();
    let (generation, steps) = run(&mut eager, &request(&turned));
    assert!(generation.chunks.iter().all(|chunk| chunk.hit));
    // The prefill of a hit is the question's prefill: the question's rows are written, and nothing is copied
    // between blocks.
    let prefill = &steps[0];
    assert!(queued(prefill, "kernel").iter().all(|name| !name.starts_with("copy")), "{prefill:?}");
    assert!(queued(prefill, "memcpy_dtod").is_empty(), "{prefill:?}");
    let moved = backend.counters().since(&before);
    assert_eq!((moved.block_copy_bytes, moved.gather_bytes), (0, 0));

    // A step takes the same number of launches for one chunk as for six chunks.
    let (_, few) = run(&mut eager, &request(&chunks[..1]));
    let launches = |steps: &[Vec<Vec<String>>]| -> Vec<usize> {
        steps[2..].iter().map(|step| queued(step, "kernel").len()).collect()
    };
    assert_eq!(launches(&few), launches(&steps));
    assert!(launches(&few).iter().all(|&n| n == launches(&few)[0] && n > 20), "{:?}", launches(&few));

    // A step takes the same number of launches for one to eight sequences, and the same number for nine to
    // hundreds of sequences, whose products are computed by cuBLAS.
    let model = model(&backend);
    let stream = backend.stream().unwrap();
    let of_batch = |sequences: usize, graphs: usize| {
        let mut batch =
            batch::Batch::new(&model, &(Arc::clone(&backend) as Arc<dyn Backend>), sequences, graphs);
        (0..3).for_each(|number| drop(batch.step(stream.as_ref(), number)));
        trace.take();
        batch.step(stream.as_ref(), 3);
        let step = trace.take();
        ["graph", "kernel"].map(|kind| queued(&step, kind).len())
    };
    for (first, others) in [(1, [2, 5, 8]), (9, [33, 65, 200])] {
        let expected = of_batch(first, 0);
        assert!(expected[1] > 10, "{expected:?}");
        for sequences in others {
            assert_eq!(of_batch(sequences, 0), expected, "{sequences} sequences");
        }
        assert_eq!(of_batch(first, 1), [1, 0], "{first} sequences by a graph");
    }

    // A replay takes one launch, one copy of the lists to the device, and one copy of the logits to the host.
    let mut graphs = engine(backend, 8);
    run(&mut graphs, &request(&chunks));
    let (by_graphs, steps) = run(&mut graphs, &request(&turned));
    assert_eq!(by_graphs.tokens, generation.tokens);
    for step in &steps[1..] {
        let of = |kind| queued(step, kind).len();
        assert_eq!(
            (of("graph"), of("kernel"), of("memcpy_htod"), of("memcpy_dtoh")),
            (1, 0, 1, 1),
            "{step:?}"
        );
    }
}
