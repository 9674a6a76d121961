//! `kvc eval`: measures the accuracy and the cost of every strategy.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use kvchunk::{ComputeMode, ContextScaling, PositionStrategy, Recompute, ReuseCell};
use kvengine::{DefaultReuse, ResultFile, TunedReuse};
use kvlab::{
    Arm, EvalOptions, Evaluation, Gate, GateCheck, GateLimits, Question, QuestionKind, Score, Trial, evaluate,
};
use serde::Serialize;

use crate::args::{EvalArgs, way};
use crate::asking;
use crate::error::{Error, Result};
use crate::plot::result_file;
use crate::progress::AnswerProgress;
use crate::report::json;
use answers::AnswerFile;

mod answers;
mod plot;
mod show;

#[derive(Serialize)]
struct EvalReport<'a> {
    questions: usize,
    seeds: usize,
    scores: &'a [Score],
}

#[derive(Serialize)]
struct GateReport<'a> {
    /// True if reuse suits the model; null if the gate cannot decide.
    fit: Option<bool>,
    checks: Vec<CheckReport<'a>>,
}

#[derive(Serialize)]
struct CheckReport<'a> {
    #[serde(flatten)]
    check: &'a GateCheck,
    holds: bool,
}

impl<'a> GateReport<'a> {
    fn of(gate: &'a Gate) -> Self {
        let report = |check: &'a GateCheck| CheckReport { check, holds: check.holds() };
        Self { fit: gate.is_fit(), checks: gate.checks.iter().map(report).collect() }
    }
}

pub(crate) fn eval(args: &EvalArgs) -> Result<()> {
    let plot = args.plot.as_deref().map(result_file).transpose()?;
    if !args.read.is_empty() {
        return read(args, plot);
    }
    if let Some(path) = &args.save_questions {
        return save(path, &asking::questions(&args.asking, asking::SHOWN)?);
    }
    let kept = args.answers.as_deref().map(result_file).transpose()?;
    let (mut engine, codec) = asking::engine(args.asking.model.as_deref(), &args.engine)?;
    let questions = asking::questions(&args.asking, if args.gate { asking::JUDGED } else { asking::SHOWN })?;
    let file = args.reuse.as_deref().map(TunedReuse::read).transpose()?;
    let tuned = file.as_ref().map(|file| file.of(engine.model())).transpose()?;
    let mut progress = AnswerProgress::new(!args.json);
    let out = &mut std::io::stdout().lock();
    let mut options = EvalOptions {
        measure: args.measure.into(),
        whole_answers: args.show > 0,
        ..asking::options(&args.asking)?
    };
    if let Some(file) = file.filter(|file| args.asking.decoys.is_empty() && !file.decoys().is_empty()) {
        options.style.decoys = file.decoys().to_vec();
    }
    if args.gate {
        let recompute = match args.strategies[..] {
            [] => None,
            [one] => Some(one),
            _ => return Err(Error::SeveralStrategies),
        };
        let limits = GateLimits {
            accuracy: args.within / 100.0,
            floor: args.floor / 100.0,
            ..GateLimits::of(args.engine.dtype)
        };
        let own = args.asking.decoys.iter().any(|path| path.as_os_str() != "built-in");
        let given = if own { options.style.decoys.len() } else { 0 };
        let usual = DefaultReuse::of(engine.model().config(), given).reuse;
        let way = tuned.unwrap_or_else(|| way(usual, args.positions, args.chunks, recompute));
        let mut count = |done, total| progress.count(done, total);
        let gate = Gate::check(&mut engine, &codec, &questions, way, limits, &options, &mut count)?;
        progress.finish();
        if args.json {
            json(out, &GateReport::of(&gate))?;
        } else {
            show::gate(out, &gate)?;
        }
        let failing = gate.failing().map(GateCheck::words).collect::<Vec<_>>().join("; ");
        return match gate.is_fit() {
            Some(true) => Ok(()),
            Some(false) => Err(Error::GateClosed(failing)),
            None => Err(Error::GateUndecided(failing)),
        };
    }
    let positions = args.positions.map_or(PositionStrategy::Sequential, Into::into);
    let scaling = ContextScaling { temperature: args.context_temperature, scale: args.context_scale };
    let mut arms = match &args.arms[..] {
        [] if tuned.is_some() => vec![Arm::full_attention()],
        [] => arms(&args.strategies, engine.model().config().num_layers(), positions, scaling),
        named => with_full_attention(named),
    };
    arms.extend(tuned.map(Arm::from));
    let asked = (options.first_draw, &questions[..]);
    let (mut file, mut known) = (None, Vec::new());
    if let Some(kept) = kept {
        let settings = answers::settings(args, &options, &engine, &codec);
        let path = kept.path().to_owned();
        let (opened, answers) = AnswerFile::open(kept, &settings, &arms, asked)?;
        if !answers.is_empty() {
            note!("continuing {}, which has {} of the answers", path.display(), answers.len());
        }
        (file, known) = (Some(opened), answers);
    }
    let mut answered = |trial: &Trial, done, total| {
        progress.count(done, total);
        file.as_mut().map_or(Ok(()), |file| file.add(trial))
    };
    let result = evaluate(&mut engine, &codec, &questions, &arms, &options, known, &mut answered);
    progress.finish();
    let evaluation = result.map_err(|error| match (error, &args.answers) {
        (kvlab::Error::NotKept(source), Some(path)) => Error::Answers { path: path.clone(), source },
        (error, _) => error.into(),
    })?;
    let (scores, trials) = (&evaluation.scores, &evaluation.trials);
    if !args.json {
        show::answers(out, &arms, asked, trials, args.show)?;
    }
    let asked = questions.iter().map(Vec::len).sum();
    report((args, plot), out, scores, (asked, questions.len()), positions)
}

/// Writes questions as a dataset, one JSON object per line.
fn save(path: &Path, draws: &[Vec<Question>]) -> Result<()> {
    let lines: serde_json::Result<Vec<String>> = draws.iter().flatten().map(serde_json::to_string).collect();
    let lines = lines.map_err(std::io::Error::from)?;
    ResultFile::open(path)
        .and_then(|file| file.write(&(lines.join("\n") + "\n")))
        .map_err(|source| Error::SavedQuestions { path: path.to_owned(), source })?;
    note!("{} questions written to {}", lines.len(), path.display());
    Ok(())
}

/// Scores the answers in the files that the options name.
fn read(args: &EvalArgs, plot: Option<ResultFile>) -> Result<()> {
    let (arms, trials) = answers::read(&args.read)?;
    let asked: BTreeSet<(usize, usize)> = trials.iter().map(|trial| (trial.draw, trial.question)).collect();
    let draws: BTreeSet<usize> = asked.iter().map(|(draw, _)| *draw).collect();
    let evaluation = Evaluation::of(&arms, trials);
    let positions = args.positions.map_or(PositionStrategy::Sequential, Into::into);
    let out = &mut std::io::stdout().lock();
    report((args, plot), out, &evaluation.scores, (asked.len(), draws.len()), positions)
}

/// Prints and plots scores.
fn report(
    (args, plot): (&EvalArgs, Option<ResultFile>),
    out: &mut impl Write,
    scores: &[Score],
    (asked, draws): (usize, usize),
    positions: PositionStrategy,
) -> Result<()> {
    if args.json {
        json(out, &EvalReport { questions: asked, seeds: draws, scores })?;
    } else {
        show::table(out, scores, draws)?;
        writeln!(out, "\n{}.", counted(asked, draws))?;
    }
    plot.map_or(Ok(()), |file| plot::plot(file, scores, draws, positions))
}

/// Formats the number of questions and the number of draws.
fn counted(asked: usize, draws: usize) -> String {
    let of = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    format!("{} in {}", of(asked, "question"), of(draws, "draw"))
}

/// Returns the arms, with full attention first, because all other arms are compared with it.
fn with_full_attention(named: &[Arm]) -> Vec<Arm> {
    let others = named.iter().filter(|arm| arm.cell.is_some());
    [Arm::full_attention()].into_iter().chain(others.copied()).collect()
}

/// Returns the default arms: full attention, every cell without recomputation and, for `positions` in both
/// modes, each of the strategies and the scaling, if one is given.
fn arms(
    strategies: &[Recompute],
    layers: usize,
    positions: PositionStrategy,
    scaling: ContextScaling,
) -> Vec<Arm> {
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
        let cell = ReuseCell { mode, strategy: positions };
        arms.extend(strategies.iter().map(|&strategy| Arm::reuse(cell, strategy)));
        if !scaling.is_plain() {
            arms.push(Arm { scaling, ..Arm::reuse(cell, Recompute::None) });
        }
    }
    arms
}

/// Returns the default strategies, in several sizes. Blends choose tokens at layer 1 or at the model's middle
/// layer; joint strategies choose them at layer 1.
fn usual(layers: usize) -> Vec<Recompute> {
    let mut strategies: Vec<Recompute> = [1, 2, 4, 8, 16].map(|tokens| Recompute::Link { tokens }).into();
    let shares = [0.05, 0.15, 0.3, 0.5];
    let of = kvchunk::DeviationOf::default();
    let mut at = vec![1, layers / 2];
    at.sort_unstable();
    at.dedup();
    for layer in at.into_iter().filter(|&layer| layer < layers) {
        strategies.extend(shares.map(|share| Recompute::Blend { share, layer, of }));
    }
    strategies.extend(shares.map(|share| Recompute::Question { share, from: None }));
    if layers > 1 {
        strategies.extend(shares.map(|share| Recompute::Joint { share, layer: 1, of }));
    }
    strategies.extend(shares.map(|share| Recompute::Random { share, seed: 0 }));
    strategies.push(Recompute::Full);
    strategies
}

/// Returns the kinds of questions that have scores.
fn kinds(scores: &[Score]) -> Vec<QuestionKind> {
    QuestionKind::ALL.into_iter().filter(|kind| scores.iter().any(|score| score.kind == *kind)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_arm_is_asked_once_for_any_number_of_layers() {
        for layers in 1..=6 {
            let arms = arms(&[], layers, PositionStrategy::Sequential, ContextScaling::default());
            let mut names: Vec<String> = arms.iter().map(Arm::name).collect();
            names.sort_unstable();
            let all = names.len();
            names.dedup();
            assert_eq!(names.len(), all, "{layers} layers: {names:?}");
            let blends = |arm: &&Arm| match arm.recompute {
                Recompute::Blend { layer, .. } => {
                    assert!(layer < layers, "layer {layer} of {layers}");
                    true
                }
                _ => false,
            };
            let places = if layers < 4 { 1 } else { 2 };
            assert_eq!(arms.iter().filter(blends).count(), 2 * 4 * places, "{layers} layers");
        }
    }

    #[test]
    fn strategies_and_a_scaling_stand_at_the_positions_that_were_asked_for() {
        let scaling = ContextScaling { temperature: 0.9, scale: 0.8 };
        let arms = arms(&[Recompute::Full], 4, PositionStrategy::Overlapped, scaling);
        let rows: Vec<String> = arms[7..].iter().map(Arm::name).collect();
        assert_eq!(
            rows,
            [
                "overlapped, with-system, full",
                "overlapped, with-system, none, T 0.9 S 0.8",
                "overlapped, alone, full",
                "overlapped, alone, none, T 0.9 S 0.8",
            ]
        );
    }
}
