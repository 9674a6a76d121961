//! Models whose weights are stored in blocks, and weights that no model can use.

use std::sync::Arc;

use half::f16;
use kvmodel::dense::{ComputeType, HostDense, StoredType, StoredWeight};
use kvmodel::{Error, Model, ModelConfig, WeightFormat, WeightProblem, Weights};
use rstest::rstest;

use crate::common::distance;
use crate::greedy::answer;

const LAYERS: usize = 2;
const HIDDEN: usize = 256;

fn config() -> ModelConfig {
    ModelConfig::benchmark(LAYERS, HIDDEN).unwrap()
}

/// Returns all weights of the model in f32.
fn weights() -> Vec<StoredWeight> {
    let (c, mut random) = (config(), Weights::random(7));
    let kv = c.kv_heads * c.head_dim;
    let mut all = Vec::new();
    let mut take = |name: String, shape: &[usize]| all.push(random.take(&name, shape).unwrap());
    take("model.embed_tokens.weight".to_owned(), &[c.vocab_size, HIDDEN]);
    take("model.norm.weight".to_owned(), &[HIDDEN]);
    for layer in 0..LAYERS {
        let at = |part: &str| format!("model.layers.{layer}.{part}.weight");
        take(at("input_layernorm"), &[HIDDEN]);
        take(at("post_attention_layernorm"), &[HIDDEN]);
        take(at("self_attn.q_proj"), &[HIDDEN, HIDDEN]);
        take(at("self_attn.k_proj"), &[kv, HIDDEN]);
        take(at("self_attn.v_proj"), &[kv, HIDDEN]);
        take(at("self_attn.o_proj"), &[HIDDEN, HIDDEN]);
        take(at("mlp.gate_proj"), &[c.intermediate_size, HIDDEN]);
        take(at("mlp.up_proj"), &[c.intermediate_size, HIDDEN]);
        take(at("mlp.down_proj"), &[HIDDEN, c.intermediate_size]);
    }
    all
}

/// Rounds 32 numbers to a `Q8_0` block.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let byte = |x: &f32| (x / scale.to_f32()).round().clamp(-127.0, 127.0) as i8 as u8;
    scale.to_le_bytes().into_iter().chain(values.iter().map(byte)).collect()
}

/// Rounds 256 numbers to a `Q4_K` block.
fn q4_k(values: &[f32]) -> Vec<u8> {
    let low: Vec<f32> = values.chunks(32).map(|group| group.iter().fold(0.0f32, |m, &x| m.min(x))).collect();
    let high = values.chunks(32).map(|group| group.iter().fold(0.0f32, |m, &x| m.max(x)));
    let steps: Vec<f32> = high.zip(&low).map(|(high, low)| (high - low) / 15.0).collect();
    let d = f16::from_f32(steps.iter().fold(0.0f32, |m, &x| m.max(x)) / 63.0);
    let dmin = f16::from_f32(low.iter().fold(0.0f32, |m, &x| m.max(-x)) / 63.0);
    let six = |x: f32, unit: f16| (x / unit.to_f32()).round().min(63.0) as u8;
    let scales: Vec<u8> = steps.iter().map(|&step| six(step, d)).collect();
    let minima: Vec<u8> = low.iter().map(|&low| six(-low, dmin)).collect();
    let mut block = [d.to_le_bytes(), dmin.to_le_bytes()].concat();
    block.extend((0..4).map(|j| scales[j] | (scales[j + 4] >> 4 << 6)));
    block.extend((0..4).map(|j| minima[j] | (minima[j + 4] >> 4 << 6)));
    block.extend((4..8).map(|j| (scales[j] & 15) | (minima[j] << 4)));
    let quant = |i: usize| {
        let (scale, minimum) =
            (d.to_f32() * f32::from(scales[i / 32]), dmin.to_f32() * f32::from(minima[i / 32]));
        ((values[i] + minimum) / scale).round().clamp(0.0, 15.0) as u8
    };
    for at in (0..256).step_by(64) {
        block.extend((at..at + 32).map(|i| quant(i) | (quant(i + 32) << 4)));
    }
    block
}

/// Rounds the matrices whose rows are whole blocks.
fn in_blocks(weight: &StoredWeight, dtype: StoredType) -> StoredWeight {
    if weight.shape().len() < 2 || !weight.width().is_multiple_of(dtype.block_elements()) {
        return weight.clone();
    }
    let of = match dtype {
        StoredType::Q8_0 => q8_0,
        StoredType::BF16 => |x: &[f32]| half::bf16::from_f32(x[0]).to_le_bytes().to_vec(),
        _ => q4_k,
    };
    let bytes: Vec<u8> = weight.to_f32().chunks(dtype.block_elements()).flat_map(of).collect();
    StoredWeight::new(weight.name(), dtype, weight.shape(), bytes).unwrap()
}

fn decoded(weight: &StoredWeight) -> StoredWeight {
    StoredWeight::of_f32(weight.name(), weight.shape(), &weight.to_f32()).unwrap()
}

fn logits(model: &Model) -> Vec<f32> {
    let prompt: Vec<u32> = (0..40).map(|i| i * 97 % 4096).collect();
    answer(model, &prompt, 1).remove(0)
}

#[rstest]
#[case(StoredType::Q8_0, 0.27)]
#[case(StoredType::Q4K, 0.35)] // the down projection has no whole blocks
fn a_model_in_blocks_answers_as_its_decoded_weights(
    #[case] dtype: StoredType,
    #[case] share: f32,
    #[values(WeightFormat::Stored, WeightFormat::Q8)] format: WeightFormat,
) {
    let blocks: Vec<_> = weights().iter().map(|weight| in_blocks(weight, dtype)).collect();
    let plain: Vec<_> = blocks.iter().map(decoded).collect();
    let [blocks, plain] = [(blocks, format), (plain, WeightFormat::Stored)]
        .map(|(weights, format)| Model::new(config(), Weights::from_stored(weights), format).unwrap());
    assert_ne!(blocks.revision(), plain.revision(), "their keys and values must not be shared");
    let held = blocks.weight_bytes() as f32 / plain.weight_bytes() as f32;
    assert!(held < share, "{held} of the memory of f32");
    let (got, expected) = (logits(&blocks), logits(&plain));
    let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let gap = distance(&got, &expected) / largest;
    println!("{dtype}, {format:?}: {gap:.2e} of the largest logit, {held:.3} of the memory");
    // With Q4_K, the down projection stays in f32, and the eight-bit format rounds it.
    let rounded = dtype == StoredType::Q4K && format == WeightFormat::Q8;
    assert!(gap < if rounded { 0.02 } else { 1e-5 }, "{gap}");
}

#[rstest]
#[case(ComputeType::Int8, StoredType::Q8_0)]
#[case(ComputeType::Bf16, StoredType::BF16)]
fn a_model_with_rounded_activations_is_another_one(#[case] compute: ComputeType, #[case] dtype: StoredType) {
    let stored: Vec<_> = weights().iter().map(|weight| in_blocks(weight, dtype)).collect();
    let [exact, rounded] = [ComputeType::Exact, compute].map(|compute| {
        let (weights, dense) =
            (Weights::from_stored(stored.clone()), HostDense::default().with_compute(compute));
        Model::with_dense(config(), weights, WeightFormat::Stored, Arc::new(dense)).unwrap()
    });
    assert_eq!(exact.identity(), rounded.identity());
    assert_ne!(exact.revision(), rounded.revision(), "their keys and values must not be shared");
    let (got, expected) = (logits(&rounded), logits(&exact));
    let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let gap = distance(&got, &expected) / largest;
    println!("activations in {compute}: {gap:.2e} of the largest logit");
    assert!(gap > 1e-4 && gap < 0.05, "{gap}");
}

#[test]
fn a_weight_that_no_model_can_take_is_named() {
    let problem = |weights: Vec<StoredWeight>| match Model::new(
        config(),
        Weights::from_stored(weights),
        WeightFormat::Stored,
    ) {
        Err(Error::Weight { name, problem }) => (name, problem),
        other => panic!("{other:?}"),
    };
    let name = "model.layers.1.mlp.up_proj.weight";
    let others = || weights().into_iter().filter(|weight| weight.name() != name).collect::<Vec<_>>();
    assert_eq!(problem(others()), (name.to_owned(), WeightProblem::Missing));
    let mut unfit = others();
    unfit.push(StoredWeight::of_f32(name, &[1, HIDDEN], &[0.0; HIDDEN]).unwrap());
    let expected = vec![config().intermediate_size, HIDDEN];
    assert_eq!(problem(unfit), (name.to_owned(), WeightProblem::Shape { expected, got: vec![1, HIDDEN] }));
}
