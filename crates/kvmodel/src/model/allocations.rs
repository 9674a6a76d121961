//! A decode step allocates what its dense steps on the host allocate, and nothing else.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use allocation_counter::measure;
use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvchunk::ChunkedPrompt;
use kvcore::{Backend, CacheKind, KvFormat, MaxLen, Stream};
use rstest::rstest;

use super::Model;
use crate::config::ModelConfig;
use crate::dense::{AttentionInput, Border, BorderExtents, WeightFormat};
use crate::engine::{Engine, EngineConfig, Request};
use crate::text::PromptTokens;
use crate::weights::Weights;

/// The numbers of tokens of two answers. Lists that grow by doubling do so before the end of the shorter.
const ANSWERS: [usize; 2] = [6, 22];

fn model(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&config).unwrap();
    config.eos.clear();
    let weights = Weights::from_directory(&folder, &mut |_, _| ()).unwrap();
    Model::new(config, weights, WeightFormat::Stored).unwrap()
}

/// The dense steps of a model, without caches and without attention.
struct DenseSteps {
    stream: Arc<dyn Stream>,
    border: Box<dyn Border>,
    logits: Vec<f32>,
}

impl DenseSteps {
    fn new(model: &Model, kv_format: KvFormat) -> Self {
        let backend = single_threaded();
        let kv = model.kv_extents(kv_format);
        let extents = BorderExtents {
            rows: 1,
            heads: model.config.heads,
            k_heads: kv.k_heads,
            v_heads: kv.v_heads,
            k_dim: kv.k_dim,
            v_dim: kv.v_dim,
            latent: model.config.latent.is_some(),
        };
        let border = model.dense.border(backend.as_ref(), &extents).unwrap();
        Self { stream: backend.stream().unwrap(), border, logits: Vec::new() }
    }

    /// Runs the dense steps of a decode step, with zeros as the output of attention.
    fn run(&mut self, model: &Model) {
        let (dense, stream) = (model.dense.as_ref(), self.stream.as_ref());
        let mut x = dense.embed(model.embedding.as_ref(), &[1]).unwrap();
        for layer in &model.layers {
            let projected = layer.project(dense, &x, None).unwrap();
            for (input, rows) in [
                (AttentionInput::Query, Some(&projected.q)),
                (AttentionInput::LatentQuery, projected.q_latent.as_ref()),
                (AttentionInput::Key, Some(&projected.k)),
                (AttentionInput::Value, Some(&projected.v)),
            ] {
                black_box(rows.map(|rows| self.border.lend(stream, input, rows).unwrap()));
            }
            let output = self.border.output(stream, 1).unwrap();
            let attention = self.border.take(stream, &output).unwrap();
            x = layer.finish(dense, &x, &attention).unwrap();
        }
        let last = model.norm.forward(dense, &x).unwrap();
        dense.read(&model.head.forward(dense, &last).unwrap(), &mut self.logits).unwrap();
    }

    /// Returns the number of allocations of a step.
    fn count(model: &Model, kv_format: KvFormat) -> u64 {
        let mut steps = Self::new(model, kv_format);
        steps.run(model);
        measure(|| steps.run(model)).count_total
    }
}

fn single_threaded() -> Arc<CpuBackend> {
    CpuBackend::with_options(&CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
}

#[rstest]
fn a_decode_step_allocates_what_its_dense_steps_do(
    #[values("llama", "qwen3", "deepseek-v3")] name: &str,
    // A static cache keeps no chunks.
    #[values((CacheKind::Paged, false), (CacheKind::Paged, true), (CacheKind::Static, false))]
    (cache, chunked): (CacheKind, bool),
    #[values(KvFormat::Dense(kvcore::DType::F32), KvFormat::Dense(kvcore::DType::BF16))] kv_format: KvFormat,
) {
    let model = model(name);
    let dense = DenseSteps::count(&model, kv_format);
    assert!(dense > 10 * model.layers.len() as u64, "{dense} allocations are no decoder");

    // Prompt and answer lie in one block.
    let config =
        EngineConfig { kv_format, cache, block_size: 64, max_len: MaxLen::from(64), ..Default::default() };
    let [short, long] = of_answers(model, &config, chunked, chunked);
    let steps = (ANSWERS[1] - ANSWERS[0]) as u64;
    assert_eq!(long - short, steps * dense, "{steps} steps, of which the dense steps allocate {dense} each");
}

#[rstest]
fn a_step_that_takes_a_block_allocates_a_few_times_more(#[values(false, true)] chunked: bool) {
    let model = model("llama");
    let dense = DenseSteps::count(&model, kvcore::DType::F32.into());
    // The settings of an engine that nobody has configured: blocks of 16, whose full ones are keyed and shared.
    let [short, long] = of_answers(model, &EngineConfig::default(), chunked, true);
    let (steps, blocks) = ((ANSWERS[1] - ANSWERS[0]) as u64, 1);
    let more = (long - short).checked_sub(steps * dense).unwrap();
    assert!(
        more <= blocks * OF_A_BLOCK,
        "{more} allocations more than those of dense steps, for {blocks} block"
    );
}

/// Allocations of a step that fills a block and takes the next: the key of the full one, its place in the index, the
/// new guard, and lists of ids that grow.
const OF_A_BLOCK: u64 = 8;

/// Returns the numbers of allocations of two requests that differ in the length of their answers.
fn of_answers(model: Model, config: &EngineConfig, chunked: bool, reuse: bool) -> [u64; 2] {
    let mut engine = Engine::new(model, single_threaded(), b"none", config).unwrap();
    let prompt = |first: u32| {
        let tokens: Vec<u32> = (first..first + 33).collect();
        if !chunked {
            return PromptTokens::Plain(tokens);
        }
        let chunks = vec![tokens[..9].to_vec(), tokens[9..20].to_vec()];
        PromptTokens::Chunked(ChunkedPrompt::new(vec![first], chunks, tokens[20..].to_vec()).unwrap())
    };
    let mut count = |answer: usize| {
        let request = Request { max_new_tokens: answer, reuse, ..engine.request(prompt(1)) };
        let mut tokens = 0;
        let counted = measure(|| tokens = engine.generate(&request, &mut ()).unwrap().tokens.len());
        assert_eq!(tokens, answer);
        counted.count_total
    };
    // The first requests grow what stays: plans and buffers of the thread, tables of the caches.
    let _ = ANSWERS.map(&mut count);
    ANSWERS.map(count)
}
