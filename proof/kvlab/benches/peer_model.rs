//! Measures a model file that `proof/peers/llama_published.py` also gives to llama.cpp: loading, prefills,
//! passes of a few rows after a context, decoding, and prompts with documents.
//!
//! `--model FILE` is a GGUF file or a Hugging Face directory. `--prefill N,N`, `--rows N,N` and `--decode N`
//! choose the measurements and their token counts. `--context N` sets the number of tokens before rows and
//! answers, `--kv FORMAT` the format of keys and values. Tokens are random, and different each time. Prints
//! one JSON object per line: a name, a size, and the best time in seconds (for decoding, the time per token).
//! Fails if cached documents take twice as long as the question alone.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvchunk::{ChunkCacheConfig, ReuseCell};
use kvcore::DType;
use kvengine::{Engine, EngineConfig, Generation, PromptTokens, Request};
use kvlab::{Error, Result, ttft_rows};
use kvmodel::{Model, ModelDirectory, WeightFormat};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The number of repetitions of measurements of less than a second. The best one is reported.
const REPETITIONS: usize = 5;

/// The number of documents in the prompt whose chunks are all cached, and the number of tokens per document.
const DOCUMENTS: (usize, usize) = (5, 512);

/// The maximum time for a prompt with cached documents, as a multiple of the time for its question alone. The
/// target is 1.1; this limit leaves room for noise.
const FOUND: f64 = 2.0;

fn argument(flag: &str) -> Option<String> {
    std::env::args().skip_while(|arg| arg != flag).nth(1)
}

fn numbers(flag: &str) -> Result<Vec<usize>> {
    let wrong = |_| Error::Workload(format!("{flag} must be numbers separated by commas"));
    argument(flag).unwrap_or_default().split_terminator(',').map(|n| n.parse().map_err(wrong)).collect()
}

struct Lab {
    engine: Engine,
    rng: StdRng,
}

impl Lab {
    fn tokens(&mut self, count: usize) -> Vec<u32> {
        let vocabulary = self.engine.model().config().vocab_size as u32;
        (0..count).map(|_| self.rng.random_range(0..vocabulary)).collect()
    }

    fn ask(&mut self, prompt: Vec<u32>, max_new_tokens: usize, reuse: bool) -> Result<Generation> {
        let request = Request { max_new_tokens, reuse, ..Request::new(PromptTokens::Plain(prompt)) };
        Ok(self.engine.generate(&request, &mut ())?)
    }

    /// Returns the time that a pass over new tokens takes after a cached context.
    fn pass(&mut self, context: &[u32], rows: usize) -> Result<Duration> {
        let prompt = [context, &self.tokens(rows)].concat();
        Ok(self.ask(prompt, 1, true)?.ttft)
    }

    /// Returns the time per token for an answer of at most `tokens` tokens.
    fn step(&mut self, context: &[u32], tokens: usize) -> Result<Duration> {
        let prompt = [context, &self.tokens(1)].concat();
        let answer = self.ask(prompt, tokens + 1, true)?;
        let steps = answer.tokens.len().saturating_sub(1) as u32;
        Ok(answer.total.saturating_sub(answer.ttft).checked_div(steps).unwrap_or(Duration::MAX))
    }

    fn best(&mut self, times: usize, one: impl Fn(&mut Self) -> Result<Duration>) -> Result<Duration> {
        (0..times).try_fold(Duration::MAX, |best, _| Ok(best.min(one(self)?)))
    }
}

fn show(what: &str, size: usize, took: Duration) {
    println!("{}", serde_json::json!({ "what": what, "size": size, "seconds": took.as_secs_f64() }));
}

/// Loads the model several times, alternating with plain reads of its file from the page cache.
fn load(path: &Path) -> Result<Model> {
    let weights = if path.is_dir() { path.join("model.safetensors") } else { path.to_owned() };
    let size = std::fs::metadata(&weights).map_or(0, |file| file.len()) as usize;
    let (mut loaded, mut read, mut model) = (Duration::MAX, Duration::MAX, None);
    for _ in 0..REPETITIONS {
        let start = Instant::now();
        let mut file = std::fs::File::open(&weights)
            .map_err(|e| Error::Workload(format!("{}: {e}", weights.display())))?;
        let mut bytes = vec![0; 1 << 20];
        while file.read(&mut bytes).is_ok_and(|n| n > 0) {}
        read = read.min(start.elapsed());
        let start = Instant::now();
        model = Some(ModelDirectory::load(path, WeightFormat::Stored, &mut |_, _| ())?.model);
        loaded = loaded.min(start.elapsed());
    }
    show("load", size, loaded);
    show("read of the file", size, read);
    model.ok_or_else(|| Error::Workload("no model".to_owned()))
}

fn main() -> Result<()> {
    let path = argument("--model").ok_or_else(|| Error::Workload("--model FILE is missing".to_owned()))?;
    let path = PathBuf::from(path);
    let model = load(&path)?;
    let half = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let kv_format = argument("--kv").map_or(Ok(DType::F32.into()), |word| word.parse())?;
    let engine = EngineConfig { chunks: half, kv_format, ..EngineConfig::default() };
    let engine = Engine::new(model, CpuBackend::new(), b"none", &engine)?;
    let mut lab = Lab { engine, rng: StdRng::seed_from_u64(7) };

    let context = lab.tokens(numbers("--context")?.first().copied().unwrap_or(512));
    lab.ask(context.clone(), 1, true)?;
    for tokens in numbers("--prefill")? {
        let times = if tokens > 1000 { 1 } else { REPETITIONS };
        let took = lab.best(times, |lab| {
            let prompt = lab.tokens(tokens);
            Ok(lab.ask(prompt, 1, false)?.ttft)
        })?;
        show("prefill", tokens, took);
    }
    for rows in numbers("--rows")? {
        show("rows", rows, lab.best(REPETITIONS, |lab| lab.pass(&context, rows))?);
    }
    for tokens in numbers("--decode")? {
        show("decode", tokens, lab.best(REPETITIONS, |lab| lab.step(&context, tokens))?);
    }
    if std::env::args().any(|arg| arg == "--chunks") {
        let (documents, length) = DOCUMENTS;
        for row in ttft_rows(&mut lab.engine, documents, length, ReuseCell::default())? {
            show(row.what, row.tokens, row.took);
            show(row.limit, row.tokens, row.limit_took);
            let times = row.took.as_secs_f64() / row.limit_took.as_secs_f64();
            if row.target.is_some() && times > FOUND {
                let (what, limit) = (row.what, row.limit);
                return Err(Error::Workload(format!("{what}: {times:.2} times the time of {limit}")));
            }
        }
    }
    Ok(())
}
