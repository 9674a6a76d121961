//! Measures the engine's own time in a decode step, apart from the model: planning, slots, sampling, sending
//! tokens.
//!
//! Prints one JSON object per line, like `kernels_against_memcpy` in `kvbench`. The limit is one hundredth of
//! the model's time for the same steps. `allocations` counts the allocations of a whole step, including the
//! model's pass; it does not depend on the number of answers. `--layers L --hidden H` set the model's
//! size. `--answers N` (at most 256) sets the largest number of answers, which is measured last.

use allocation_counter::measure;
use kvbackend_cpu::CpuBackend;
use kvengine::{Answer, Engine, EngineConfig, PromptTokens, Request};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};

/// The number of steps to measure.
const STEPS: usize = 12;

fn number(name: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)?.parse().ok()).unwrap_or(default)
}

fn main() -> kvlab::Result<()> {
    let (layers, hidden, most) =
        (number("--layers", 8), number("--hidden", 1024), number("--answers", 256).clamp(4, 256));
    let config = ModelConfig::benchmark(layers, hidden)?;
    for answers in [most / 4, most / 2, most] {
        let model = Model::new(config.clone(), Weights::random(1), WeightFormat::Stored)?;
        let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
        let mut reads: Vec<Answer> = (0..answers)
            .map(|i| {
                let prompt = (0..17).map(|j| (i * 31 + j * 7) as u32 % 1000).collect();
                let max_new_tokens = 2 * STEPS + 64;
                engine.submit(Request {
                    max_new_tokens,
                    ignore_end: true,
                    ..Request::new(PromptTokens::Plain(prompt))
                })
            })
            .collect::<Result<_, _>>()?;
        // Prompts run first, followed by steps that grow the reused buffers.
        while engine.step()?.tokens != answers {}
        for _ in 0..8 {
            engine.step()?;
        }
        let mut best = (f64::INFINITY, f64::INFINITY);
        for _ in 0..STEPS {
            let before = engine.step_times();
            engine.step()?;
            let after = engine.step_times();
            best.0 = best.0.min(after.engine.saturating_sub(before.engine).as_secs_f64());
            best.1 = best.1.min(after.model.saturating_sub(before.model).as_secs_f64());
            for answer in &mut reads {
                while answer.try_next().is_some() {}
            }
        }
        // The minimum over a few steps, because in some steps sequences start a new block.
        let mut allocations = u64::MAX;
        for _ in 0..8 {
            let mut stepped = Ok(());
            allocations = allocations.min(measure(|| stepped = engine.step().map(drop)).count_total);
            stepped?;
        }
        let (own, limit) = (best.0, best.1 / 100.0);
        let line = serde_json::json!({
            "what": format!("decode step of the engine beside the model, {layers} layers of {hidden}"),
            "size": answers, "unit": "answers", "seconds": own,
            "limit": "a hundredth of the model's time", "limit_seconds": limit, "ratio": limit / own,
            "allocations": allocations,
        });
        println!("{line}");
    }
    Ok(())
}
