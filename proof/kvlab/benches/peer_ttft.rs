//! Measures the time to first token (TTFT) of the prompts that `proof/peers/llama_cpp.py` also gives to
//! llama.cpp with the same weights.
//!
//! `--model DIR` holds config.json and safetensors. `--prompts FILE` holds token ids: `system`, `documents`
//! and `questions`. Every request uses the next question. Prints one JSON object per line: a scenario, its
//! best time, the number of tokens that it computed, its first token, and two distances. A distance is the
//! largest difference between the log-probabilities of the likeliest tokens and their values without any
//! cache: once under the same mask, once under full attention.

use std::path::PathBuf;

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ChunkedPrompt};
use kvengine::{Engine, EngineConfig, Generation, PromptTokens, Request};
use kvlab::{Error, Result};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
use serde::Deserialize;

#[derive(Deserialize)]
struct PeerPrompts {
    system: Vec<u32>,
    documents: Vec<Vec<u32>>,
    questions: Vec<Vec<u32>>,
}

/// A measured scenario.
struct Scenario {
    name: &'static str,
    /// Reorders the documents.
    order: fn(&mut Vec<Vec<u32>>),
    /// True if documents do not attend to each other.
    chunked: bool,
}

const SCENARIOS: [Scenario; 3] = [
    Scenario { name: "same order", order: |_| (), chunked: false },
    Scenario { name: "rotated, chunks", order: |d| d.rotate_left(1), chunked: true },
    Scenario { name: "reversed, chunks", order: |d| d.reverse(), chunked: true },
];

/// The number of repetitions, of which the best is reported.
const REPETITIONS: usize = 3;

fn argument(flag: &str) -> Result<PathBuf> {
    let mut args = std::env::args().skip_while(|arg| arg != flag).skip(1);
    args.next().map(PathBuf::from).ok_or_else(|| Error::Workload(format!("{flag} PATH is missing")))
}

fn read(path: PathBuf) -> Result<String> {
    std::fs::read_to_string(&path).map_err(|source| kvmodel::Error::Io { path, source }.into())
}

/// The method of computing a prompt.
#[derive(Clone, Copy)]
enum ScenarioWay {
    /// With cached KV.
    Cached,
    /// Under the same mask, without any cache.
    Uncached,
    /// With documents that attend to each other, without any cache.
    Full,
}

struct Lab {
    engine: Engine,
    prompts: PeerPrompts,
}

impl Lab {
    /// Requests an answer of one token, with the scenario's document order.
    fn ask(&mut self, scenario: &Scenario, question: usize, way: ScenarioWay) -> Result<Generation> {
        let mut documents = self.prompts.documents.clone();
        (scenario.order)(&mut documents);
        let question = self.prompts.questions[question % self.prompts.questions.len()].clone();
        let prompt = ChunkedPrompt::new(self.prompts.system.clone(), documents, question)?;
        let prompt = if scenario.chunked {
            PromptTokens::Chunked(prompt)
        } else {
            PromptTokens::Plain(prompt.flatten())
        };
        let request = Request {
            reuse: matches!(way, ScenarioWay::Cached),
            full_attention: matches!(way, ScenarioWay::Full),
            max_new_tokens: 1,
            keep_logits: true,
            ..Request::new(prompt)
        };
        Ok(self.engine.generate(&request, &mut ())?)
    }
}

/// The number of tokens whose log-probabilities are compared. llama.cpp is asked for the same number.
const LIKELIEST: usize = 20;

/// Returns the log-probabilities of the first token.
fn logprobs(answer: &Generation) -> Vec<f32> {
    let logits = answer.logits.first().map_or(&[][..], Vec::as_slice);
    let top = logits.iter().fold(f32::NEG_INFINITY, |top, &x| top.max(x));
    let sum: f32 = logits.iter().map(|x| (x - top).exp()).sum();
    logits.iter().map(|x| x - top - sum.ln()).collect()
}

/// Returns the largest log-probability difference over the most likely tokens of `exact`.
fn apart(answer: &Generation, exact: &Generation) -> f32 {
    let (answer, exact) = (logprobs(answer), logprobs(exact));
    let mut order: Vec<usize> = (0..exact.len()).collect();
    order.sort_by(|&a, &b| exact[b].total_cmp(&exact[a]));
    order.iter().take(LIKELIEST).map(|&i| (answer[i] - exact[i]).abs()).fold(0.0, f32::max)
}

fn show(name: &str, answer: &Generation, off: Option<[f32; 2]>) {
    let line = serde_json::json!({
        "scenario": name, "seconds": answer.ttft.as_secs_f64(), "tokens": answer.prompt_tokens,
        "computed": answer.prompt_tokens - answer.cached_tokens, "first": answer.tokens.first(),
        "off_mask": off.map(|off| off[0]), "apart": off.map(|off| off[1]),
    });
    println!("{line}");
}

fn main() -> Result<()> {
    let directory = argument("--model")?;
    let prompts: PeerPrompts = serde_json::from_str(&read(argument("--prompts")?)?)
        .map_err(|e| Error::Workload(format!("prompts: {e}")))?;
    let config = ModelConfig::from_json(&read(directory.join("config.json"))?)?;
    let weights = Weights::from_directory(&directory, &mut |_, _| ())?;
    let model = Model::new(config, weights, WeightFormat::Stored)?;
    let half = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let engine = EngineConfig { chunks: half, ..EngineConfig::default() };
    let mut lab = Lab { engine: Engine::new(model, CpuBackend::new(), b"none", &engine)?, prompts };

    show("cold", &lab.ask(&SCENARIOS[0], 0, ScenarioWay::Full)?, None);
    for scenario in &SCENARIOS {
        // The cached KV comes from the first order, so each measured order is new.
        lab.ask(&Scenario { order: |_| (), ..*scenario }, 0, ScenarioWay::Cached)?;
        let mut best = lab.ask(scenario, 1, ScenarioWay::Cached)?;
        let full = lab.ask(scenario, 1, ScenarioWay::Full)?;
        let exact = if scenario.chunked { &lab.ask(scenario, 1, ScenarioWay::Uncached)? } else { &full };
        let off = [apart(&best, exact), apart(&best, &full)];
        for question in 2..=REPETITIONS {
            let answer = lab.ask(scenario, question, ScenarioWay::Cached)?;
            best = if answer.ttft < best.ttft { answer } else { best };
        }
        show(scenario.name, &best, Some(off));
    }
    Ok(())
}
