//! Tests that a decode step allocates only what its dense steps on the host allocate.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use allocation_counter::measure;
use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvcore::{Backend, KvFormat, Stream};
use rstest::rstest;

use super::Model;
use crate::config::ModelConfig;
use crate::dense::{AttentionInput, Border, BorderExtents, WeightFormat};
use crate::weights::Weights;

#[path = "../../tests/suite/greedy.rs"]
#[allow(dead_code, reason = "the suite uses the rest")]
mod greedy;

use greedy::Greedy;

fn model(name: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name);
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&config).unwrap();
    config.eos.clear();
    let weights = Weights::from_directory(&folder, &mut |_, _| ()).unwrap();
    Model::new(config, weights, WeightFormat::Stored).unwrap()
}

/// A model's dense steps, without caches or attention.
struct CountedDense {
    stream: Arc<dyn Stream>,
    border: Box<dyn Border>,
    logits: Vec<f32>,
}

impl CountedDense {
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

    /// Runs a decode step's dense steps, with zeros as attention's output.
    fn run(&mut self, model: &Model) {
        let (dense, stream) = (model.dense.as_ref(), self.stream.as_ref());
        let mut x = dense.embed(model.embedding.as_ref(), &[1], 1.0).unwrap();
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
            let attention = self.border.take(stream, output).unwrap();
            x = layer.finish(dense, &x, &attention).unwrap();
        }
        let last = model.norm.forward(dense, &x).unwrap();
        dense.read(&model.head.forward(dense, &last).unwrap(), &mut self.logits).unwrap();
    }

    /// Returns the number of allocations per step.
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
    #[values(KvFormat::Dense(kvcore::DType::F32), KvFormat::Dense(kvcore::DType::BF16))] kv_format: KvFormat,
) {
    let model = model(name);
    let dense = CountedDense::count(&model, kv_format);
    assert!(dense > 10 * model.layers.len() as u64, "{dense} allocations are no decoder");
    // All tokens fit in one block.
    let mut sequence = Greedy::new(&model, kv_format, 64, 64);
    // The first step grows memory that later steps reuse: the thread's plans and buffers, and lists as
    // long as the sequence.
    sequence.prefill(&[1, 2, 3, 4, 5]);
    for token in 0..40 {
        sequence.step(token);
    }
    sequence.restart();
    sequence.prefill(&[1, 2, 3, 4, 5]);
    for token in 0..20 {
        let counted = measure(|| _ = black_box(sequence.step(token))).count_total;
        assert_eq!(counted, dense, "step {token}");
    }
}
