//! `kvc tune`: finds the cheapest reuse settings whose loss compared with full attention is within a limit.

use std::io::Write;

use kvchunk::PositionPlan;
use kvengine::{PromptTokens, TunedBy, TunedReuse};
use kvlab::{Arm, GateLimits, Question, QuestionKind, TuneOptions, TuneRow, Tuning, Verdict};
use serde::Serialize;

use crate::args::TuneArgs;
use crate::asking;
use crate::error::{Error, Result};
use crate::plot::result_file;
use crate::progress::AnswerProgress;
use crate::report::{json, table};

#[derive(Serialize)]
struct TuneReport<'a> {
    #[serde(flatten)]
    tuning: &'a Tuning,
    /// True if the answers show that the loss is within the limit, false if they show that it is not, and
    /// null if they show neither.
    fits: Option<bool>,
    /// The file that was written; null if no candidate passed.
    file: Option<&'a std::path::Path>,
}

pub(crate) fn tune(args: &TuneArgs) -> Result<()> {
    let out = result_file(&args.out)?;
    let (mut engine, codec) = asking::engine(args.asking.model.as_deref(), &args.engine)?;
    let questions = asking::questions(&args.asking, asking::JUDGED)?;
    let screened = screened(&questions, args.screen);
    let local = |draw: Vec<Question>| -> Vec<Question> {
        draw.into_iter().filter(|question| question.kind == QuestionKind::Local).collect()
    };
    let judged: Vec<Vec<Question>> = questions.into_iter().map(local).collect();
    let eval = asking::options(&args.asking)?;
    let mut candidates = args.candidates.clone();
    if candidates.is_empty() {
        let config = engine.model().config();
        candidates = usual(config.num_layers());
        // The decoys may make prompts longer than the model's context.
        let prompt = |question: &Question| {
            let order: Vec<usize> = (0..question.documents.len()).collect();
            eval.style.prompt(question, &order, &codec)
        };
        let prompts = screened.iter().map(prompt).collect::<kvlab::Result<Vec<_>>>()?;
        candidates.retain(|arm| {
            let plan = |prompt: &PromptTokens| match (prompt, arm.cell) {
                (PromptTokens::Chunked(prompt), Some(cell)) => {
                    PositionPlan::new(prompt, cell, config.max_positions).is_ok()
                }
                _ => true,
            };
            prompts.iter().all(plan)
        });
    }
    let limits = GateLimits {
        accuracy: args.within / 100.0,
        floor: args.floor / 100.0,
        ..GateLimits::of(args.engine.dtype)
    };
    let options = TuneOptions { candidates, limits, eval };
    let mut progress = AnswerProgress::new(!args.json);
    let tuning = Tuning::search(&mut engine, &codec, (&screened, &judged), &options, &mut |done, total| {
        progress.count(done, total);
    })?;
    progress.finish();
    let (choice, mut file) = (tuning.choice(), None);
    if let Some(choice) = choice {
        // A search accepts only candidates with reuse.
        let way = choice.arm.reused().unwrap_or_default();
        let paired = choice.paired.unwrap_or_default();
        let measured = TunedBy {
            questions: paired.asked,
            lost: paired.lost,
            gained: paired.gained,
            within: args.within,
            fits: fits(choice),
            divergence: choice.divergence,
            operations: choice.operations,
        };
        TunedReuse::new(engine.model(), way, &options.eval.style.decoys, measured).write(out)?;
        file = Some(args.out.as_path());
    }
    let out = &mut std::io::stdout().lock();
    if args.json {
        let report = TuneReport { tuning: &tuning, fits: choice.and_then(fits), file };
        json(out, &report)?;
    } else {
        show(out, &tuning, args)?;
    }
    match choice {
        Some(_) => Ok(()),
        None => Err(Error::NothingJudged { right: 100.0 * tuning.right, floor: args.floor }),
    }
}

fn fits(row: &TuneRow) -> Option<bool> {
    match row.verdict {
        Some(Verdict::Holds) => Some(true),
        Some(Verdict::Fails) => Some(false),
        Some(Verdict::CannotSay) | None => None,
    }
}

/// Returns up to `count` questions: the first questions of every draw, taken from the draws in turn.
fn screened(draws: &[Vec<Question>], count: usize) -> Vec<Question> {
    let longest = draws.iter().map(Vec::len).max().unwrap_or(0);
    let each = (0..longest).flat_map(|at| draws.iter().filter_map(move |draw| draw.get(at)));
    each.take(count).cloned().collect()
}

/// Returns the default candidates, which differ in cost. Joint strategies compare deviations at layer 1;
/// blends compare them at a third of the model's depth.
fn usual(layers: usize) -> Vec<Arm> {
    let third = (layers / 3).max(1);
    let blend = |share: f64| format!("blend:{share}@{third}");
    let mut ways: Vec<String> = [
        "overlapped,with-system,none",
        "sequential,with-system,none",
        "sequential,alone,none",
        "sequential,alone,link:4",
        "sequential,alone,link:16",
        "sequential,alone,link:32",
        "sequential,sink:4,none",
        "sequential,sink:4,link:16",
        "sequential,behind:3,none",
        "sequential,behind:7,none",
    ]
    .map(str::to_owned)
    .into();
    let strategies = [
        "link:4",
        "link:16",
        "link:32",
        "question:0.05",
        "question:0.1",
        "question:0.2",
        "question:0.3",
        "question:0.5",
        "joint:0.1@1",
        "joint:0.2@1",
    ];
    let blends = [blend(0.1), blend(0.2), blend(0.3)];
    ways.extend(
        strategies
            .map(str::to_owned)
            .into_iter()
            .chain(blends)
            .map(|s| format!("sequential,with-system,{s}")),
    );
    ways.iter().filter_map(|way| way.parse().ok()).collect()
}

/// Prints the candidates, cheapest first, and the reuse settings that were written.
fn show(out: &mut impl Write, tuning: &Tuning, args: &TuneArgs) -> Result<()> {
    let mut rows = table(&[
        "",
        "positions, mode, recomputed",
        "divergence",
        "operations",
        "TTFT",
        "asked",
        "points lost",
        "",
    ]);
    let percent = |share: f64| format!("{:5.1} %", 100.0 * share);
    for (at, row) in tuning.rows.iter().enumerate() {
        let (asked, lost) = match row.paired {
            Some(paired) => (paired.asked.to_string(), paired.points()),
            None => (String::new(), String::new()),
        };
        let verdict = match row.verdict {
            Some(Verdict::Holds) => "within limit",
            Some(Verdict::Fails) => "above limit",
            Some(Verdict::CannotSay) => "undecided",
            None => "",
        };
        rows.add_row([
            if Some(at) == tuning.chosen { "→".to_owned() } else { String::new() },
            row.name.clone(),
            format!("{:.3}", row.divergence),
            percent(row.operations),
            percent(row.ttft),
            asked,
            lost,
            verdict.to_owned(),
        ]);
    }
    writeln!(out, "{rows}")?;
    writeln!(
        out,
        "\nDivergence from full attention is in nats per token. The operations of the prefill and the time to first \
         token (TTFT) are relative to full attention. Points lost, per hundred questions: the questions that only full \
         attention answered correctly, minus the questions that only this candidate answered correctly. In brackets: the \
         smallest and the largest loss that the answers do not rule out (one-sided 95 % confidence, for each candidate \
         by itself)."
    )?;
    let Some(choice) = tuning.choice() else { return Ok(()) };
    let file = args.out.display();
    if fits(choice) == Some(true) {
        writeln!(
            out,
            "\n{file} contains the cheapest candidate whose loss is at most {} points: {}. With many candidates, one may \
             pass by chance: check it with other questions, using `kvc eval --gate --reuse {file}` and another --dataset \
             or --first-seed.",
            args.within, choice.name
        )?;
    } else {
        writeln!(
            out,
            "\nThe answers do not show for any candidate that its loss is at most {} points. {file} contains the \
             candidate with the lowest upper bound: {}. Ask more questions, or allow a larger loss with --within.",
            args.within, choice.name
        )?;
    }
    Ok(writeln!(out, "To use it:  kvc run --reuse {file}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_usual_candidate_is_a_way_of_reuse() {
        for layers in [1, 2, 30] {
            let all = usual(layers);
            assert_eq!(all.len(), 23, "{layers} layers");
            assert!(all.iter().all(|arm| arm.reused().is_some()));
        }
    }
}
