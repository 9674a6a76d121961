//! Models that are stored entirely on a device give the host's tokens and logits. The device is an NVIDIA GPU
//! or an Ascend NPU, or a test double of its driver.
#![cfg(all(feature = "ascend", feature = "cuda"))]

use std::sync::Arc;

use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvbackend_cpu::CpuBackend;
use kvbackend_cuda::{CudaBackend, CudaOptions};
use kvchunk::{ContextScaling, LocalReplica, Recompute, ReuseCell};
use kvcore::{Backend, GraphCounts, KeyForm, KvFormat, ManualClock};
use kvengine::{Engine, EngineConfig, PromptTokens, Request, Scheduling};
use kvmodel::dense::{AscendDense, CudaDense, Dense};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
use rstest::rstest;

use crate::batch::Batch;
use crate::common::{Golden, distance, folder, load_model, weights};
use crate::crowd::{MODEL, assert_each_as_alone, engine_of, mixed};
use crate::views::answer;

/// The kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Cuda,
    Ascend,
}

/// Opens a device with its dense steps. Prints the reason if there is no such device.
fn opened(kind: Kind, device: usize) -> Option<(Arc<dyn Backend>, Arc<dyn Dense>)> {
    let open = || -> kvmodel::Result<(Arc<dyn Backend>, Arc<dyn Dense>)> {
        match kind {
            Kind::Cuda => {
                let backend = CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() })?;
                let dense = CudaDense::new(&backend)?;
                Ok((backend, Arc::new(dense)))
            }
            Kind::Ascend => {
                let backend = AscendBackend::with_options(&AscendOptions { device, plain: false })?;
                let dense = AscendDense::new(&backend)?;
                Ok((backend, Arc::new(dense)))
            }
        }
    };
    open().inspect_err(|reason| kvconform::skip(reason)).ok()
}

/// A model with latent attention, only dense layers, and random weights.
const LATENT: &str = "latent";

fn on_device(name: &str, dense: Arc<dyn Dense>) -> Model {
    let latent = name == LATENT;
    let name = if latent { "deepseek-v3-plain" } else { name };
    let config = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&if latent { without_experts(&config) } else { config }).unwrap();
    config.eos.clear();
    let weights = if latent { Weights::random(3) } else { weights(name) };
    Model::with_dense(config, weights, WeightFormat::Stored, dense).unwrap()
}

fn without_experts(config: &str) -> String {
    let dense = config.replace("\"first_k_dense_replace\": 1", "\"first_k_dense_replace\": 2");
    assert!(dense != config && dense.contains("\"num_hidden_layers\": 2"));
    dense
}

#[rstest]
#[case("llama", "none")]
#[case("mistral", "none")]
#[case("qwen2", "link:2")]
#[case("qwen3", "none")]
#[case("gemma3", "none")]
#[case("deepseek-v3", "none")]
#[case("deepseek-v3-plain", "none")]
#[case("llama", "blend:0.5@1:both")]
#[case("deepseek-v3", "blend:0.5@1:both")]
fn models_on_the_device_answer_as_on_the_host(
    #[case] name: &str,
    #[case] strategy: &str,
    #[values(Kind::Cuda, Kind::Ascend)] kind: Kind,
    #[values(0, 1)] device: usize,
    #[values(KeyForm::Rotated, KeyForm::Unrotated)] keys: KeyForm,
) {
    let Some((backend, dense)) = opened(kind, device) else { return };
    let request = Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell::SEQUENTIAL_ALONE,
        max_new_tokens: 3,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(Golden::load(name).prompt))
    };
    let before = backend.counters();
    let got = answer(on_device(name, dense), backend.clone(), keys, &request);
    let crossed = backend.counters().since(&before);
    let expected = answer(load_model(name), CpuBackend::new(), keys, &request);
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((&got.tokens, got.prefill_flops), (&expected.tokens, expected.prefill_flops));
        assert!(distance(&got.logits.concat(), &expected.logits.concat()) < 1e-4);
    }
    assert!(got[1].cached_tokens > 0, "chunks are hits");
    // With routed experts, scores are also copied to the host, and a blend compares keys on the host.
    if !name.starts_with("deepseek") && strategy != "blend:0.5@1:both" {
        let rows: Vec<usize> = got.iter().flat_map(|g| &g.logits).map(|logits| 4 * logits.len()).collect();
        // The first request computes its parts in a pass without a question, where a row for each shows that it has numbers.
        let parts = 1 + Golden::load(name).prompt.chunks().len();
        let checks = if strategy == "link:2" { parts * rows[0] } else { 0 };
        let logits = rows.iter().sum::<usize>() + checks;
        assert_eq!(crossed.host_read_bytes as usize, logits, "only logits come down");
    }
}

/// Runs concurrent requests with their caches on the device, and with the whole model on it.
#[rstest]
fn requests_at_once_on_the_device_answer_as_each_alone_on_the_host(
    #[values(Kind::Cuda, Kind::Ascend)] kind: Kind,
    #[values(false, true)] whole: bool,
) {
    let Some((backend, dense)) = opened(kind, 0) else { return };
    let model = if whole { on_device(MODEL, dense) } else { load_model(MODEL) };
    let requests: Vec<Request> = mixed(16, 7)
        .into_iter()
        .map(|request| Request { ignore_end: true, max_new_tokens: request.max_new_tokens.min(6), ..request })
        .collect();
    let scheduling = Scheduling { step_tokens: 48, ..Scheduling::default() };
    let mut engine = engine_of(model, backend, 44, scheduling, 1 << 20, &ManualClock::default());
    let last = assert_each_as_alone(&mut engine, &requests);
    assert!(last.preemptions > 0, "{last:?}");
}

/// Returns the bits of all logits of three requests to one engine with at most `graphs` graphs, and the
/// engine's graph counts.
fn bits(
    name: &str,
    (kind, device): (Kind, usize),
    keys: KeyForm,
    graphs: usize,
) -> Option<(Vec<u32>, GraphCounts)> {
    let (backend, dense) = opened(kind, device)?;
    let config = EngineConfig { block_size: 4, keys, graphs, ..EngineConfig::default() };
    let mut engine = Engine::new(on_device(name, dense), backend, b"none", &config).unwrap();
    let prompt = Golden::load(if name == LATENT { "deepseek-v3-plain" } else { name }).prompt;
    let scaling = ContextScaling { temperature: 0.9, scale: 1.1 };
    let chunked = Request {
        cell: ReuseCell::SEQUENTIAL_ALONE,
        max_new_tokens: 7,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(prompt.clone()))
    };
    let plain = Request { prompt: PromptTokens::Plain(prompt.flatten()).into(), ..chunked.clone() };
    let mut bits = Vec::new();
    for request in [&chunked, &plain, &Request { scaling, ..chunked.clone() }] {
        let generation = engine.generate(request, &mut ()).unwrap();
        bits.extend(generation.logits.iter().flatten().map(|x| x.to_bits()));
    }
    Some((bits, engine.graph_counts()))
}

#[rstest]
fn graphs_of_whole_decode_steps_give_the_bits_of_eager_steps(
    #[values("llama", "mistral", "qwen2", "qwen3", "gemma3", "llama-dynamic", "deepseek-v3", LATENT)]
    name: &str,
    #[values(Kind::Cuda, Kind::Ascend)] kind: Kind,
    #[values((0, KeyForm::Rotated), (1, KeyForm::Rotated), (1, KeyForm::Unrotated))] setting: (
        usize,
        KeyForm,
    ),
) {
    let (device, keys) = setting;
    let Some((expected, none)) = bits(name, (kind, device), keys, 0) else { return };
    let (got, counts) = bits(name, (kind, device), keys, 4).unwrap();
    assert!(got == expected, "{name}: {counts:?}");
    assert_eq!(none, GraphCounts::default(), "without graphs, no step goes through their cache");
    if name == "deepseek-v3" {
        assert!(
            counts.refused > 0 && counts.replayed == 0,
            "routed experts are chosen on the host: {counts:?}"
        );
    } else {
        assert!(counts.refused == 0 && counts.replayed > 3, "{counts:?}");
    }
}

#[rstest]
fn batches_of_any_size_decode_by_graphs(
    #[values("llama", LATENT)] name: &str,
    #[values(1, 3, 5, 11)] sequences: usize,
    #[values(Kind::Cuda, Kind::Ascend)] kind: Kind,
    #[values(0, 1)] device: usize,
) {
    let Some((backend, dense)) = opened(kind, device) else { return };
    let (model, stream) = (on_device(name, dense), backend.stream().unwrap());
    let (mut eager, mut graphs) =
        (Batch::new(&model, &backend, sequences, 0), Batch::new(&model, &backend, sequences, 2));
    for number in 0..8 {
        let expected = eager.step(stream.as_ref(), number);
        assert!(graphs.step(stream.as_ref(), number) == expected, "step {number}");
    }
    let GraphCounts { replayed, refused, .. } = graphs.memory.counts();
    assert!(refused == 0 && replayed >= 4, "{replayed} replayed, {refused} refused");
}

/// Engines on two devices of one process share chunks, which are copied from device to device.
#[rstest]
#[case(Kind::Cuda, "bf16")]
#[case(Kind::Cuda, "int8:8")]
#[case(Kind::Cuda, "fp8-e4m3")]
#[case(Kind::Ascend, "bf16")]
#[case(Kind::Ascend, "int8:8")]
fn replicas_on_other_devices_hand_their_chunks_over(
    #[case] kind: Kind,
    #[case] kv_format: KvFormat,
    #[values([0, 1], [1, 0])] devices: [usize; 2],
) {
    let mut engines = Vec::new();
    for (device, replica) in devices.into_iter().zip(LocalReplica::group(2)) {
        let Some((backend, dense)) = opened(kind, device) else { return };
        let config = EngineConfig { block_size: 4, kv_format, ..EngineConfig::default() };
        let mut engine = Engine::new(on_device("llama", dense), backend, b"none", &config).unwrap();
        replica.serve(engine.chunks().unwrap(), &engine.replica_device());
        engine.join(Arc::new(replica));
        engines.push(engine);
    }
    let request = Request {
        max_new_tokens: 3,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(Golden::load("llama").prompt))
    };
    engines[0].generate(&request, &mut ()).unwrap();
    let expected = engines[0].generate(&request, &mut ()).unwrap();
    let before: Vec<_> = engines.iter().map(|engine| engine.backend().counters()).collect();
    let got = engines[1].generate(&request, &mut ()).unwrap();
    let read = |at: usize| engines[at].backend().counters().since(&before[at]).host_read_bytes as usize;
    let fetched = engines[1].chunks().unwrap().metrics().fetched as usize;
    assert_eq!((fetched, &got.tokens), (got.chunks.len(), &expected.tokens));
    assert!(distance(&got.logits.concat(), &expected.logits.concat()) < 1e-5);
    let logits: usize = got.logits.iter().map(|logits| 4 * logits.len()).sum();
    let scales = if matches!(kv_format, KvFormat::Fp8 { .. }) { read(0) } else { 0 };
    assert_eq!((read(0), read(1)), (scales, logits + scales), "no chunk goes through the host");
}

/// Two engines use one stream and one set of dense steps, each in its own thread. A capture by one engine
/// must not include the other engine's work.
#[rstest]
fn engines_that_share_a_stream_capture_side_by_side(
    #[values(Kind::Cuda, Kind::Ascend)] kind: Kind,
    #[values(0, 1)] device: usize,
) {
    let Some((backend, dense)) = opened(kind, device) else { return };
    let config = EngineConfig { block_size: 4, ..EngineConfig::default() };
    let one = Engine::new(on_device("llama", dense.clone()), backend, b"one", &config).unwrap();
    let two = one.sharing_memory(on_device("llama", dense), b"two").unwrap();
    let request = Request {
        max_new_tokens: 6,
        keep_logits: true,
        ..Request::new(PromptTokens::Plain(Golden::load("llama").prompt.flatten()))
    };
    let answers = std::thread::scope(|scope| {
        let request = &request;
        let run = move |mut engine: Engine| {
            let answers = [(); 6].map(|()| engine.generate(request, &mut ()).unwrap().logits);
            (answers, engine.graph_counts())
        };
        [one, two].map(|engine| scope.spawn(move || run(engine))).map(|thread| thread.join().unwrap())
    });
    let first = &answers[0].0[0];
    for (answers, counts) in &answers {
        assert!(counts.replayed > 10 && counts.refused == 0, "{counts:?}");
        // An engine's first request does not find a cached prefix.
        assert!(answers.iter().all(|logits| distance(&logits.concat(), &first.concat()) < 1e-5));
    }
}
