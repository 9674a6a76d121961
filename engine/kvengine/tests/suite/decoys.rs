//! Documents behind decoys and in slots in the engine: with every recompute strategy, in batches, and on every
//! backend.
#![cfg(all(feature = "ascend", feature = "cuda", feature = "wgpu"))]

use std::sync::Arc;

use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvbackend_cpu::CpuBackend;
use kvbackend_cuda::{CudaBackend, CudaOptions};
use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvchunk::{ComputeMode, PositionStrategy, Recompute, ReuseCell};
use kvcore::{Backend, KeyForm};
use kvengine::{Engine, EngineConfig, Generation, PromptTokens, Request};
use rstest::rstest;

use crate::common::{Golden, distance, load_model};
use crate::crowd::answer_all;
use crate::views::answer;

/// Returns a request for a golden prompt, with its documents computed in `mode`.
fn request(name: &str, strategy: &str, mode: ComputeMode) -> Request {
    Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell { mode, strategy: PositionStrategy::Sequential },
        max_new_tokens: 3,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(Golden::behind_decoys(name).prompt))
    }
}

fn assert_same(got: &Generation, expected: &Generation) {
    assert_eq!(got.tokens, expected.tokens);
    let gap = distance(&got.logits.concat(), &expected.logits.concat());
    assert!(gap < 1e-4, "{gap}");
}

#[rstest]
fn reuse_behind_decoys_equals_computing_from_scratch(
    #[values("llama", "mistral", "qwen2", "qwen3", "gemma3", "deepseek-v3")] name: &str,
    #[values("none", "link:2", "random:0.3@1", "question:0.4", "blend:0.5@1", "joint:0.5@1", "full")]
    strategy: &str,
    #[values(ComputeMode::Behind(3), ComputeMode::Slots(3))] mode: ComputeMode,
) {
    let config = EngineConfig { block_size: 4, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model(name), CpuBackend::new(), b"none", &config).unwrap();
    let request = request(name, strategy, mode);
    let scratch = engine.generate(&Request { reuse: false, ..request.clone() }, &mut ()).unwrap();
    let first = engine.generate(&request, &mut ()).unwrap();
    let found = engine.generate(&request, &mut ()).unwrap();
    assert!(found.chunks.iter().all(|chunk| chunk.hit && chunk.exact));
    for generation in [&first, &found] {
        assert_same(generation, &scratch);
    }
    let plain = engine.generate(&Request { cell: ReuseCell::SEQUENTIAL_WITH_SYSTEM, ..request }, &mut ());
    assert!(plain.unwrap().chunks.iter().all(|chunk| !chunk.hit), "chunks without decoys are others");
}

/// Opens a backend. Prints the reason if there is no such device.
fn opened(backend: &str) -> Option<Arc<dyn Backend>> {
    let open = || -> kvcore::Result<Arc<dyn Backend>> {
        Ok(match backend {
            "cuda" => CudaBackend::with_options(&CudaOptions::default())?,
            "ascend" => AscendBackend::with_options(&AscendOptions { device: 0, plain: false })?,
            _ => WgpuBackend::with_options(&WgpuOptions::default())?,
        })
    };
    open().inspect_err(|reason| kvconform::skip(reason)).ok()
}

#[rstest]
fn every_backend_answers_behind_decoys_as_the_cpu(
    #[values("llama", "qwen3", "deepseek-v3")] name: &str,
    #[values("none", "question:0.4")] strategy: &str,
    #[values("cuda", "ascend", "wgpu")] backend: &str,
    #[values(ComputeMode::Behind(3), ComputeMode::Slots(3))] mode: ComputeMode,
) {
    let Some(backend) = opened(backend) else { return };
    let request = request(name, strategy, mode);
    let got = answer(load_model(name), backend, KeyForm::Rotated, &request);
    let expected = answer(load_model(name), CpuBackend::new(), KeyForm::Rotated, &request);
    for (got, expected) in got.iter().zip(&expected) {
        assert_same(got, expected);
    }
    assert!(got[1].cached_tokens > 0, "chunks are hits");
}

/// Requests with the same system prompt and decoys compute the decoys once.
#[test]
fn requests_at_once_share_the_decoys() {
    let config = EngineConfig { block_size: 4, ..EngineConfig::default() };
    let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"none", &config).unwrap();
    let request = request("llama", "none", ComputeMode::Behind(3));
    let alone = engine.generate(&Request { reuse: false, ..request.clone() }, &mut ()).unwrap();
    for answer in answer_all(&mut engine, &vec![request; 4]).1 {
        assert_same(&answer.samples()[0], &alone);
    }
    let chunks = engine.chunks().unwrap().metrics();
    assert_eq!(chunks.insertions, 3, "each document is computed once");
}

/// A library's own documents may be its decoys. One of them may then be asked for, too.
#[test]
fn a_document_may_be_one_of_the_decoys() {
    let config = EngineConfig { block_size: 4, ..EngineConfig::default() };
    for mode in [ComputeMode::Behind(3), ComputeMode::Slots(3)] {
        let mut engine = Engine::new(load_model("llama"), CpuBackend::new(), b"none", &config).unwrap();
        let asked = request("llama", "none", mode);
        let golden = Golden::behind_decoys("llama").prompt;
        let mut decoys = golden.decoys().to_vec();
        decoys[1] = golden.chunks()[0].clone();
        let prompt = PromptTokens::Chunked(golden.with_decoys(decoys.into()).unwrap());
        let asked = Request { prompt: prompt.into(), ..asked };
        let scratch = engine.generate(&Request { reuse: false, ..asked.clone() }, &mut ()).unwrap();
        for hits in [0, 3] {
            let got = engine.generate(&asked, &mut ()).unwrap();
            assert_eq!(got.chunks.iter().filter(|chunk| chunk.hit).count(), hits, "{mode}");
            assert_same(&got, &scratch);
        }
    }
}
