//! `kvc doctor answers`: why an answer with reuse differs from others.

use std::io::Write;
use std::sync::Arc;

use kvchunk::{Recompute, RecomputeStrategy};
use kvcore::{DType, KvFormat};
use kvengine::{Engine, Generation, PromptTokens, Request, Sampler, Sampling};
use kvmodel::TextCodec;
use kvmodel::dense::ComputeType;
use serde::Serialize;

use crate::args::{AnswersArgs, BackendName, EngineArgs};
use crate::asking;
use crate::error::{Error, Result};
use crate::progress::LiveAnswer;
use crate::report::{json, table};
use crate::run::{RunPrompts, variables};
use crate::way::ChosenWay;

/// The number of characters of an answer that the table shows.
const SHOWN: usize = 40;

/// The conclusion from the answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Conclusion {
    /// Answers with the cache differ from the same computation without it by more than rounding.
    CacheIsWrong,
    /// Documents were not found again, so that nothing is known about the cache.
    NotExamined,
    /// Answers have other tokens where two tokens are about as likely.
    Rounding,
    /// The cache is right, and full attention gives another answer.
    DocumentsApart,
    /// Full attention gives the same answer.
    NotReuse,
}

/// The differences from the answer without a cache that a conclusion follows from.
#[derive(Debug, Clone, Copy)]
struct Compared<'a> {
    /// The differences of the answers with reuse.
    reuse: &'a [Difference],
    /// The differences with nothing recomputed, if rounding may have chosen other tokens to recompute.
    plain: &'a [Difference],
    /// The difference of full attention.
    full: Difference,
    /// The number of documents that were not found again.
    not_examined: usize,
}

impl Conclusion {
    /// Draws the conclusion from differences of which rounding explains some.
    fn of(compared: Compared<'_>, rounding: f64) -> Self {
        let Compared { reuse, plain, full, not_examined } = compared;
        let exceed = |all: &[Difference]| all.iter().any(|difference| difference.exceeds(rounding));
        let tie = reuse.iter().filter_map(|difference| difference.first_other_token).min();
        if exceed(reuse) && (plain.is_empty() || exceed(plain)) {
            Self::CacheIsWrong
        } else if not_examined > 0 {
            Self::NotExamined
        } else {
            match (tie, full.first_other_token) {
                (None, None) => Self::NotReuse,
                (tie, Some(other)) if full.exceeds(rounding) && tie.is_none_or(|tie| other <= tie) => {
                    Self::DocumentsApart
                }
                _ => Self::Rounding,
            }
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::CacheIsWrong => {
                "The cache is wrong: answers with it differ from the same computation without it by more than rounding."
            }
            Self::NotExamined => {
                "The cache was not examined for all documents, because some were not found again. Those that were found \
                 gave no other answer than rounding explains."
            }
            Self::Rounding => {
                "The answers differ only by rounding at a near tie: two tokens are about as likely there, or two tokens \
                 of documents about as important to recompute."
            }
            Self::DocumentsApart => {
                "The cache is right. The answer changes because documents do not see each other."
            }
            Self::NotReuse => "Reuse is not the cause: full attention gives the same answer.",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::CacheIsWrong => {
                "run cargo xtask test and cargo xtask conform --backend NAME on this machine, and report the result; \
                 until then, answer with --no-chunk-cache, and start servers without --reuse"
            }
            Self::NotExamined => "raise --kv-memory until the second answer finds all documents",
            Self::Rounding => {
                "none is needed: either answer is as good; --dtype f32 and --compute exact make such ties rarer"
            }
            Self::DocumentsApart => {
                "recompute more (--recompute), give --decoys, or measure with kvc tune what this model needs"
            }
            Self::NotReuse => "change the prompt, its documents or the model",
        }
    }
}

/// The difference between an answer and the answer without a cache.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Difference {
    /// The number of the first token that is another one, from 1, or `None` if all tokens are the same.
    first_other_token: Option<usize>,
    /// The largest difference of the log-probabilities of the cacheless answer's tokens, up to the first other token. There,
    /// the log-probability of the other one counts, too.
    #[serde(rename = "largest_difference")]
    logprob: f64,
}

impl Difference {
    /// Compares the logits that two answers were chosen from. After the first other token, the answers have different
    /// contexts, so the rest is not compared.
    fn between(logits: &[Vec<f32>], cacheless: &[Vec<f32>]) -> Self {
        let mut found = Self::default();
        for (number, (row, own)) in (1..).zip(logits.iter().zip(cacheless)) {
            let (token, other) = (likeliest(own), likeliest(row));
            for token in [token, other] {
                let gap = (logprob(row, token) - logprob(own, token)).abs();
                // NaN is larger than all numbers in this order.
                if gap.total_cmp(&found.logprob).is_gt() {
                    found.logprob = gap;
                }
            }
            if other != token {
                found.first_other_token = Some(number);
                break;
            }
        }
        found
    }

    /// Returns whether rounding does not explain the difference, for example because it is NaN.
    fn exceeds(&self, rounding: f64) -> bool {
        self.logprob.total_cmp(&rounding).is_gt()
    }
}

fn likeliest(logits: &[f32]) -> u32 {
    Sampler::new(Sampling::default()).sample(logits)
}

/// Returns the logarithm of a token's probability.
fn logprob(logits: &[f32], token: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    f64::from(own) - largest - sum.ln()
}

/// Returns the largest difference of log-probabilities that rounding explains: sums in another order, and where keys,
/// values or activations are narrow, numbers that are rounded to the neighbour. The products of a GPU may be narrow, too.
fn rounding(args: &EngineArgs) -> f64 {
    let sums_alone = args.dtype == KvFormat::Dense(DType::F32)
        && args.compute == ComputeType::Exact
        && matches!(args.backend, BackendName::Cpu);
    if sums_alone { 0.01 } else { 0.1 }
}

/// An answer, and how it was computed.
#[derive(Debug, Serialize)]
struct Answered {
    way: &'static str,
    text: String,
    tokens: Vec<u32>,
    documents: usize,
    /// The number of documents that were found in the cache.
    found: usize,
    #[serde(flatten)]
    difference: Difference,
}

/// The report, as written by `--json`.
#[derive(Debug, Serialize)]
struct AnswersReport {
    conclusion: Conclusion,
    meaning: &'static str,
    remedy: &'static str,
    rounding: f64,
    /// The number of documents that the second answer did not find, so that their copies were not examined.
    not_examined: usize,
    answers: Vec<Answered>,
}

pub(super) fn examine(args: &AnswersArgs) -> Result<()> {
    let prompts = RunPrompts::read(&args.asked)?;
    let variables = variables(&args.asked)?;
    let (mut engine, codec) = asking::engine(args.model.as_deref(), &args.engine)?;
    let codec = codec.with_variables(variables)?;
    let ChosenWay { reuse, decoys, .. } = ChosenWay::new(&args.way, engine.model(), &codec)?;
    args.disk.open(&mut engine)?;
    let request = |engine: &Engine, tokens: PromptTokens| -> Result<Request> {
        let request = engine.request(tokens.with_decoys(Arc::clone(&decoys))?).reusing(&reuse);
        Ok(Request { max_new_tokens: args.max_new_tokens, keep_logits: true, ..request })
    };
    for earlier in prompts.warm(&codec) {
        let earlier = request(&engine, earlier?)?;
        engine.generate(&earlier, &mut LiveAnswer::new(&codec, &[], false)?)?;
    }
    let asked = prompts.asked(&codec)?;
    match (&asked.tokens, prompts.note(&asked)) {
        (_, Some(note)) => note!("{note}"),
        (PromptTokens::Plain(_), None) => note!("The prompt has no documents, so nothing can be reused."),
        (PromptTokens::Chunked(_), None) => (),
    }
    let request = request(&engine, asked.tokens)?;
    let mut ask = |request: &Request, reuse, full_attention| {
        answer(&mut engine, &codec, &Request { reuse, full_attention, ..request.clone() })
    };
    let (first, again, cacheless, full) = (
        ask(&request, true, false)?,
        ask(&request, true, false)?,
        ask(&request, false, false)?,
        ask(&request, false, true)?,
    );
    let ways = [
        ("reuse, first", first),
        ("reuse, again", again),
        ("without a cache", cacheless.clone()),
        ("full attention", full),
    ];
    let bound = rounding(&args.engine);
    let mut answers = compared(ways, &cacheless);
    let exceeds = answers.iter().take(2).any(|answer| answer.difference.exceeds(bound));
    if exceeds && !reuse.recompute.evidence().is_none() {
        // At a near tie, rounding chooses other tokens to recompute, which changes an answer by more than rounding does.
        let plain = Request { recompute: Arc::new(Recompute::None), ..request };
        let (first, again, cacheless) =
            (ask(&plain, true, false)?, ask(&plain, true, false)?, ask(&plain, false, false)?);
        let ways = [
            ("reuse, nothing recomputed", first),
            ("reuse, nothing recomputed, again", again),
            ("without a cache, nothing recomputed", cacheless.clone()),
        ];
        answers.extend(compared(ways, &cacheless));
    }
    let report = AnswersReport::new(answers, bound);
    show(&mut std::io::stdout().lock(), &report, args.json)?;
    report.verdict()
}

/// Answers one request. Returns the text, too.
fn answer(engine: &mut Engine, codec: &TextCodec, request: &Request) -> Result<(String, Generation)> {
    let mut live = LiveAnswer::new(codec, &[], false)?;
    let mut generation = engine.generate(request, &mut live)?;
    Ok((live.finish(&mut generation)?, generation))
}

/// Compares answers with the one without a cache.
fn compared<const N: usize>(
    ways: [(&'static str, (String, Generation)); N],
    cacheless: &(String, Generation),
) -> Vec<Answered> {
    let answered = |(way, (text, answer)): (_, (_, Generation))| Answered {
        way,
        text,
        documents: answer.chunks.len(),
        found: answer.chunks.iter().filter(|chunk| chunk.hit).count(),
        difference: Difference::between(&answer.logits, &cacheless.1.logits),
        tokens: answer.tokens,
    };
    ways.into_iter().map(answered).collect()
}

impl AnswersReport {
    /// Draws the conclusion from answers: two with reuse, one without a cache, and one with full attention. Then perhaps the
    /// first three again with nothing recomputed.
    fn new(answers: Vec<Answered>, rounding: f64) -> Self {
        let differences: Vec<Difference> = answers.iter().map(|answer| answer.difference).collect();
        let not_examined = answers.get(1).map_or(0, |again| again.documents - again.found);
        let (reuse, rest) = differences.split_at(differences.len().min(2));
        let compared = Compared {
            reuse,
            plain: rest.get(2..).unwrap_or_default(),
            full: rest.get(1).copied().unwrap_or_default(),
            not_examined,
        };
        let conclusion = Conclusion::of(compared, rounding);
        let (meaning, remedy) = (conclusion.meaning(), conclusion.remedy());
        Self { conclusion, meaning, remedy, rounding, not_examined, answers }
    }

    /// Returns an error if the cache is wrong.
    fn verdict(&self) -> Result<()> {
        if self.conclusion != Conclusion::CacheIsWrong {
            return Ok(());
        }
        let with_cache = self.answers.iter().take(2).map(|answer| answer.difference.logprob);
        let difference = with_cache.max_by(f64::total_cmp).unwrap_or_default();
        Err(Error::WrongCache { difference, rounding: self.rounding })
    }
}

fn show(out: &mut impl Write, report: &AnswersReport, as_json: bool) -> Result<()> {
    if as_json {
        return json(out, report);
    }
    let mut rows =
        table(&["computed with", "documents found", "answer", "first other token", "largest difference"]);
    for Answered { way, text, documents, found, difference, .. } in &report.answers {
        let mut line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((end, _)) = line.char_indices().nth(SHOWN) {
            line.truncate(end);
            line.push('…');
        }
        let other = difference.first_other_token.map_or_else(String::new, |number| number.to_string());
        let gap = format!("{:.6}", difference.logprob);
        rows.add_row([way, &*format!("{found} of {documents}"), &line, &other, &gap]);
    }
    writeln!(
        out,
        "{rows}\n\nDifferences are those of log-probabilities from the answer without a cache; rounding explains up to {}.",
        report.rounding
    )?;
    if report.not_examined > 0 {
        writeln!(out, "Documents that were not found again, and not examined: {}.", report.not_examined)?;
    }
    writeln!(out, "{}\nRemedy: {}.", report.meaning, report.remedy)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of logits in which one of three tokens leads by `lead`.
    fn rows(tokens: &[usize], lead: f32) -> Vec<Vec<f32>> {
        let row = |&token: &usize| (0..3).map(|at| if at == token { lead } else { 0.0 }).collect();
        tokens.iter().map(row).collect()
    }

    fn difference(first_other_token: Option<usize>, logprob: f64) -> Difference {
        Difference { first_other_token, logprob }
    }

    #[test]
    fn a_difference_ends_with_the_first_other_token() {
        let cacheless = rows(&[0, 1, 2], 5.0);
        let same = Difference::between(&cacheless, &cacheless);
        assert_eq!((same.first_other_token, same.logprob), (None, 0.0));
        let other = Difference::between(&rows(&[0, 2, 0], 5.0), &cacheless);
        assert_eq!(other.first_other_token, Some(2));
        assert!((other.logprob - 5.0).abs() < 1e-6, "{other:?}");
        let nearer = Difference::between(&rows(&[0, 1, 2], 4.0), &cacheless);
        assert!(nearer.first_other_token.is_none() && nearer.logprob > 0.01, "{nearer:?}");
        let nothing = Difference::between(&[vec![f32::NAN; 3]], &cacheless);
        assert!(nothing.logprob.is_nan() && nothing.exceeds(0.1));
        // The cacheless answer's token is as likely as it was, and another one, which was unlikely, has become likelier.
        let risen = Difference::between(&[vec![0.0, 0.01, -9.0]], &[vec![0.0, -9.0, 0.0]]);
        assert!(risen.first_other_token == Some(1) && risen.exceeds(1.0), "{risen:?}");
    }

    #[test]
    fn rounding_is_larger_where_something_is_narrow() {
        use clap::Parser as _;
        #[derive(clap::Parser)]
        struct Alone {
            #[command(flatten)]
            engine: EngineArgs,
        }
        let bound = |args: &[&str]| {
            let alone = Alone::try_parse_from([&["kvc"], args].concat()).unwrap();
            rounding(&alone.engine)
        };
        assert_eq!(bound(&[]), 0.01);
        for narrow in [["--dtype", "bf16"], ["--dtype", "int8"], ["--compute", "int8"], ["--backend", "cuda"]]
        {
            assert_eq!(bound(&narrow), 0.1, "{narrow:?}");
        }
    }

    #[test]
    fn each_conclusion_follows_from_its_differences() {
        let (same, tie) = (difference(None, 1e-5), difference(Some(3), 1e-4));
        let (far, none) = (difference(None, 0.02), difference(None, f64::NAN));
        let other = difference(Some(1), 2.0);
        let of = |reuse: [Difference; 2], full| {
            Conclusion::of(Compared { reuse: &reuse, plain: &[], full, not_examined: 0 }, 0.01)
        };
        assert_eq!(of([same, same], same), Conclusion::NotReuse);
        assert_eq!(of([same, same], far), Conclusion::NotReuse);
        assert_eq!(of([same, same], other), Conclusion::DocumentsApart);
        assert_eq!(of([same, tie], other), Conclusion::DocumentsApart, "before the tie");
        for rounded in [[same, tie], [tie, same], [tie, tie]] {
            assert_eq!(of(rounded, same), Conclusion::Rounding);
            assert_eq!(of(rounded, difference(Some(4), 2.0)), Conclusion::Rounding, "behind the tie");
        }
        assert_eq!(of([same, same], tie), Conclusion::Rounding);
        for wrong in [far, none] {
            assert_eq!(of([same, wrong], same), Conclusion::CacheIsWrong);
            assert_eq!(of([wrong, same], other), Conclusion::CacheIsWrong);
        }
    }

    #[test]
    fn another_choice_of_tokens_to_recompute_is_rounding_unless_the_rest_differs_too() {
        let (same, other) = (difference(None, 1e-5), difference(Some(1), 2.0));
        let of = |plain: &[Difference]| {
            let reuse = [same, other];
            Conclusion::of(Compared { reuse: &reuse, plain, full: same, not_examined: 0 }, 0.01)
        };
        assert_eq!(of(&[]), Conclusion::CacheIsWrong);
        assert_eq!(of(&[same, same, same]), Conclusion::Rounding);
        assert_eq!(of(&[same, other, same]), Conclusion::CacheIsWrong);
    }

    #[test]
    fn a_report_says_what_is_wrong_and_what_was_not_examined() {
        let report = |found: usize, differences: &[Difference]| {
            let answered = |&difference: &Difference| Answered {
                way: "",
                text: String::new(),
                tokens: Vec::new(),
                documents: 2,
                found,
                difference,
            };
            AnswersReport::new(differences.iter().map(answered).collect(), 0.01)
        };
        let (same, far, other) = (difference(None, 1e-5), difference(None, 0.02), difference(Some(1), 2.0));
        let wrong = report(2, &[same, far, same, same]);
        let error = wrong.verdict();
        assert!(matches!(error, Err(Error::WrongCache { difference, .. }) if difference == far.logprob));
        assert!(wrong.remedy.contains("without --reuse"), "{}", wrong.remedy);
        let chosen = report(2, &[same, other, same, same, same, same, same]);
        assert_eq!((chosen.conclusion, chosen.not_examined), (Conclusion::Rounding, 0));
        chosen.verdict().unwrap();
        for full in [same, other] {
            let partly = report(1, &[same, same, same, full]);
            assert_eq!((partly.conclusion, partly.not_examined), (Conclusion::NotExamined, 1));
            let shown = |as_json| {
                let mut out = Vec::new();
                show(&mut out, &partly, as_json).unwrap();
                String::from_utf8(out).unwrap()
            };
            assert!(!shown(false).contains("is right") && shown(false).contains("not examined: 1."));
            let json: serde_json::Value = serde_json::from_str(&shown(true)).unwrap();
            assert_eq!((&json["conclusion"], &json["not_examined"]), (&"not_examined".into(), &1.into()));
            partly.verdict().unwrap();
        }
        assert_eq!(report(1, &[same, far, same, same]).conclusion, Conclusion::CacheIsWrong);
        assert_eq!(report(2, &[same, same, same, other]).conclusion, Conclusion::DocumentsApart);
    }
}
