//! `kvc eval`: accuracy of every way to answer, and what it costs.

use std::io::Write;

use kvchunk::{ChunkCacheConfig, ComputeMode, PositionStrategy, Recompute, ReuseCell};
use kvmodel::eval::{Arm, Gate, GateCheck, GateLimits, Question, QuestionKind, Score, World, evaluate};
use kvmodel::{Engine, EngineConfig, ModelDirectory};
use serde::Serialize;

use crate::args::EvalArgs;
use crate::error::{Error, Result};
use crate::progress::bar;
use crate::{backend, embedded, load};

mod show;

#[derive(Serialize)]
struct Report<'a> {
    questions: usize,
    seeds: usize,
    scores: &'a [Score],
}

pub(crate) fn eval(args: &EvalArgs) -> Result<()> {
    let ModelDirectory { model, codec } = load::model(args.model.as_deref(), args.weights)?;
    let chunks = ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() };
    let questions = questions(args, &chunks.separator)?;
    let config = EngineConfig { kv_format: args.dtype, keys: args.keys, chunks, ..EngineConfig::default() };
    let mut engine = Engine::new(model, backend::open(args.backend)?, codec.digest(), &config)?;
    let bar = bar("answers", "{pos}/{len} {eta}", !args.json);
    let mut progress = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let out = &mut std::io::stdout().lock();
    if args.gate {
        let cell = ReuseCell { mode: args.chunks.into(), strategy: args.positions.into() };
        let limits = GateLimits { accuracy: args.floor / 100.0, ..GateLimits::of(args.dtype) };
        let gate = Gate::check(&mut engine, &codec, &questions, cell, limits, &mut progress)?;
        bar.finish_and_clear();
        if args.json {
            json(out, &gate)?;
        } else {
            show::gate(out, &gate)?;
        }
        let failing: Vec<String> = gate.failing().map(GateCheck::words).collect();
        return if failing.is_empty() { Ok(()) } else { Err(Error::GateClosed(failing.join("; "))) };
    }
    let arms = arms(&args.strategies, engine.model().config().num_layers());
    let scores = evaluate(&mut engine, &codec, &questions, &arms, &mut progress)?;
    bar.finish_and_clear();
    let asked = questions.iter().map(Vec::len).sum();
    if let Some(path) = &args.plot {
        show::plot(path, &scores)?;
    }
    if args.json {
        return json(out, &Report { questions: asked, seeds: questions.len(), scores: &scores });
    }
    show::table(out, &scores)?;
    writeln!(
        out,
        "\n{asked} questions in {} draws; ± is a 95 % confidence interval over draws.",
        questions.len()
    )?;
    Ok(())
}

fn json(out: &mut impl Write, value: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *out, value).map_err(std::io::Error::from)?;
    writeln!(out)?;
    Ok(())
}

/// Questions for each seed.
fn questions(args: &EvalArgs, separator: &str) -> Result<Vec<Vec<Question>>> {
    let beside = |name: &str| args.model.as_ref().map(|dir| dir.join(name)).filter(|path| path.exists());
    let read = |path: &std::path::Path| {
        std::fs::read_to_string(path).map_err(|source| Error::Dataset { path: path.to_owned(), source })
    };
    if let Some(path) = args.dataset.clone().or_else(|| beside("dataset.jsonl")) {
        let all = Question::read_all(&read(&path)?, separator)?;
        // Every so-manyth question: the parts are alike.
        let part = |seed: usize| all.iter().skip(seed).step_by(args.seeds).cloned().collect::<Vec<_>>();
        return Ok((0..args.seeds).map(part).filter(|part| !part.is_empty()).collect());
    }
    let world = match (&args.model, beside("world.json")) {
        (None, _) => World::from_json(embedded::WORLD)?,
        (Some(_), Some(path)) => World::from_json(&read(&path)?)?,
        (Some(dir), None) => return Err(Error::NoDataset(dir.clone())),
    };
    Ok((0..args.seeds).map(|seed| world.questions(seed as u64, args.questions)).collect())
}

/// Full attention, every cell without recomputation, and strategies at the positions of an ordinary prompt.
fn arms(strategies: &[Recompute], layers: usize) -> Vec<Arm> {
    let chosen;
    let strategies = if strategies.is_empty() {
        chosen = usual(layers);
        &chosen
    } else {
        strategies
    };
    let mut arms = vec![Arm::full_attention()];
    arms.extend(ReuseCell::ALL.map(|cell| Arm::reuse(cell, Recompute::None)));
    for mode in [ComputeMode::WithSystem, ComputeMode::Alone] {
        let cell = ReuseCell { mode, strategy: PositionStrategy::Sequential };
        arms.extend(strategies.iter().map(|&strategy| Arm::reuse(cell, strategy)));
    }
    arms
}

/// Strategies of several sizes; blends at layer 1 and at the middle of the model.
fn usual(layers: usize) -> Vec<Recompute> {
    let mut strategies: Vec<Recompute> = [1, 2, 4, 8, 16].map(|tokens| Recompute::Link { tokens }).into();
    let shares = [0.05, 0.15, 0.3, 0.5];
    let of = kvchunk::DeviationOf::default();
    for layer in [1, layers / 2] {
        if layer < layers {
            strategies.extend(shares.map(|share| Recompute::Blend { share, layer, of }));
        }
    }
    strategies.extend(shares.map(|share| Recompute::Random { share, seed: 0 }));
    strategies.push(Recompute::Full);
    strategies.dedup();
    strategies
}

/// The kinds of question that scores have.
fn kinds(scores: &[Score]) -> Vec<QuestionKind> {
    QuestionKind::ALL.into_iter().filter(|kind| scores.iter().any(|score| score.kind == *kind)).collect()
}
