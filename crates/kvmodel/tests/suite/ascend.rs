//! Models that lie on an Ascend NPU as a whole, or on the simulator of CANN: the host's tokens and logits.
#![cfg(feature = "ascend")]

use std::sync::Arc;

use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvbackend_cpu::CpuBackend;
use kvchunk::{Recompute, ReuseCell};
use kvcore::{Backend, KeyForm};
use kvmodel::dense::AscendDense;
use kvmodel::{Model, ModelConfig, PromptTokens, Request, WeightFormat, Weights};
use rstest::rstest;

use crate::common::{Golden, distance, folder, load_model};
use crate::views::answer;

/// Returns a model with all its steps on a device, and its backend; none, with a message, without a device.
fn on_device(name: &str, device: usize) -> Option<(Model, Arc<AscendBackend>)> {
    let said = |reason: &dyn std::fmt::Display| kvconform::skip(reason);
    let backend =
        AscendBackend::with_options(&AscendOptions { device }).inspect_err(|reason| said(reason)).ok()?;
    let dense = AscendDense::new(&backend).inspect_err(|reason| said(reason)).ok()?;
    let config = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
    let mut config = ModelConfig::from_json(&config).unwrap();
    config.eos.clear();
    let weights = Weights::from_directory(&folder(name), &mut |_, _| ()).unwrap();
    let model = Model::with_dense(config, weights, WeightFormat::F32, Arc::new(dense)).unwrap();
    Some((model, backend))
}

#[rstest]
#[case("llama", "none")]
#[case("mistral", "none")]
#[case("qwen2", "link:2")]
#[case("qwen3", "none")]
#[case("deepseek-v3", "none")]
#[case("deepseek-v3-plain", "none")]
#[case("llama", "blend:0.5@1:both")]
#[case("deepseek-v3", "blend:0.5@1:both")]
fn models_on_the_device_answer_as_on_the_host(
    #[case] name: &str,
    #[case] strategy: &str,
    #[values(0, 1)] device: usize,
    #[values(KeyForm::Rotated, KeyForm::Unrotated)] keys: KeyForm,
) {
    let Some((model, backend)) = on_device(name, device) else { return };
    let request = Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell::ALL[2],
        max_new_tokens: 3,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(Golden::load(name).prompt))
    };
    let before = backend.counters();
    let got = answer(model, backend.clone(), keys, &request);
    let crossed = backend.counters().since(&before);
    let expected = answer(load_model(name), CpuBackend::new(), keys, &request);
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((&got.tokens, got.prefill_flops), (&expected.tokens, expected.prefill_flops));
        assert!(distance(&got.logits.concat(), &expected.logits.concat()) < 1e-4);
    }
    assert!(got[1].cached_tokens > 0, "chunks are hits");
    // With routed experts, scores come down too, and a blend compares keys on the host.
    if !name.starts_with("deepseek") && strategy != "blend:0.5@1:both" {
        let logits: usize = got.iter().flat_map(|g| &g.logits).map(|logits| 4 * logits.len()).sum();
        assert_eq!(crossed.host_read_bytes as usize, logits, "only logits come down");
    }
}
