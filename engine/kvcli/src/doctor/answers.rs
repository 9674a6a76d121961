//! `kvc doctor answers`: why an answer with reuse differs from others.

use std::io::Write;
use std::sync::Arc;

use kvcore::{DType, KvFormat};
use kvengine::{Engine, Generation, PromptTokens, Request, Sampler, Sampling};
use kvmodel::TextCodec;
use serde::Serialize;

use crate::args::AnswersArgs;
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
    /// The cache is right, and full attention gives another answer.
    DocumentsApart,
    /// Full attention gives the same answer.
    NotReuse,
}

impl Conclusion {
    /// Draws the conclusion from the differences between the cacheless answer and the others.
    fn of(reuse: &[&Difference], full: &Difference, rounding: f64) -> Self {
        if reuse.iter().any(|difference| difference.logprob.total_cmp(&rounding).is_gt()) {
            Self::CacheIsWrong
        } else if full.first_other_token.is_some() {
            Self::DocumentsApart
        } else {
            Self::NotReuse
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::CacheIsWrong => {
                "The cache is wrong: answers with it differ from the same computation without it by more than rounding."
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
                 until then, answer with --no-chunk-cache"
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
    /// The index of the first token that is another one, or `None` if all tokens are the same.
    first_other_token: Option<usize>,
    /// The largest difference of the log-probabilities of the cacheless answer's tokens, up to the first other token.
    #[serde(rename = "largest_difference")]
    logprob: f64,
}

impl Difference {
    /// Compares the logits that two answers were chosen from. After the first other token, the answers have different
    /// contexts, so the rest is not compared.
    fn between(logits: &[Vec<f32>], cacheless: &[Vec<f32>]) -> Self {
        let mut found = Self::default();
        for (at, (row, own)) in logits.iter().zip(cacheless).enumerate() {
            let token = likeliest(own);
            let gap = (logprob(row, token) - logprob(own, token)).abs();
            // A number that is none is larger than all others in this order.
            if gap.total_cmp(&found.logprob).is_gt() {
                found.logprob = gap;
            }
            if likeliest(row) != token {
                found.first_other_token = Some(at);
                break;
            }
        }
        found
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

/// Returns the largest difference of log-probabilities that rounding explains: sums in another order, and in narrow
/// formats numbers that are rounded to the neighbour.
fn rounding(format: KvFormat) -> f64 {
    if format == KvFormat::Dense(DType::F32) { 0.01 } else { 0.1 }
}

/// An answer, and how it was computed.
#[derive(Serialize)]
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
#[derive(Serialize)]
struct AnswersReport {
    conclusion: Conclusion,
    meaning: &'static str,
    remedy: &'static str,
    rounding: f64,
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
    let mut ask = |reuse, full_attention| {
        answer(&mut engine, &codec, &Request { reuse, full_attention, ..request.clone() })
    };
    let (first, again, cacheless, full) =
        (ask(true, false)?, ask(true, false)?, ask(false, false)?, ask(false, true)?);
    let report = AnswersReport::new(first, again, cacheless, full, rounding(args.engine.dtype));
    show(&report, args.json)?;
    report.verdict()
}

/// Answers one request. Returns the text, too.
fn answer(engine: &mut Engine, codec: &TextCodec, request: &Request) -> Result<(String, Generation)> {
    let mut live = LiveAnswer::new(codec, &[], false)?;
    let mut generation = engine.generate(request, &mut live)?;
    Ok((live.finish(&mut generation)?, generation))
}

impl AnswersReport {
    /// Compares the answers: two with reuse, one without a cache, and one with full attention.
    fn new(
        first: (String, Generation),
        again: (String, Generation),
        cacheless: (String, Generation),
        full: (String, Generation),
        rounding: f64,
    ) -> Self {
        let between =
            |(_, answer): &(_, Generation)| Difference::between(&answer.logits, &cacheless.1.logits);
        let differences = [&first, &again, &cacheless, &full].map(between);
        let [of_first, of_again, _, of_full] = &differences;
        let conclusion = Conclusion::of(&[of_first, of_again], of_full, rounding);
        let ways = [
            ("reuse, first", first),
            ("reuse, again", again),
            ("without a cache", cacheless),
            ("full attention", full),
        ];
        let answered = |((way, (text, answer)), difference): ((_, (_, Generation)), _)| Answered {
            way,
            text,
            documents: answer.chunks.len(),
            found: answer.chunks.iter().filter(|chunk| chunk.hit).count(),
            tokens: answer.tokens,
            difference,
        };
        let answers = ways.into_iter().zip(differences).map(answered).collect();
        let (meaning, remedy) = (conclusion.meaning(), conclusion.remedy());
        Self { conclusion, meaning, remedy, rounding, answers }
    }

    /// Returns an error if the cache is wrong.
    fn verdict(&self) -> Result<()> {
        let with_cache = self.answers.iter().take(2).map(|answer| answer.difference.logprob);
        let difference = with_cache.max_by(f64::total_cmp).unwrap_or_default();
        match self.conclusion {
            Conclusion::CacheIsWrong => Err(Error::WrongCache { difference, rounding: self.rounding }),
            Conclusion::DocumentsApart | Conclusion::NotReuse => Ok(()),
        }
    }
}

fn show(report: &AnswersReport, as_json: bool) -> Result<()> {
    let out = &mut std::io::stdout().lock();
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
        let other = difference.first_other_token.map_or_else(String::new, |at| (at + 1).to_string());
        let gap = format!("{:.6}", difference.logprob);
        rows.add_row([way, &*format!("{found} of {documents}"), &line, &other, &gap]);
    }
    let [_, again, ..] = &report.answers[..] else { return Ok(()) };
    writeln!(
        out,
        "{rows}\n\nDifferences are those of log-probabilities from the answer without a cache; rounding explains up to {}.\n\
         {}\nRemedy: {}.",
        report.rounding, report.meaning, report.remedy
    )?;
    if again.found < again.documents {
        note!(
            "{} of {} documents were not found again, so the cache was examined in part; raise --kv-memory",
            again.documents - again.found,
            again.documents
        );
    }
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

    #[test]
    fn a_difference_ends_with_the_first_other_token() {
        let cacheless = rows(&[0, 1, 2], 5.0);
        let same = Difference::between(&cacheless, &cacheless);
        assert_eq!((same.first_other_token, same.logprob), (None, 0.0));
        let other = Difference::between(&rows(&[0, 2, 0], 5.0), &cacheless);
        assert_eq!(other.first_other_token, Some(1));
        assert!((other.logprob - 5.0).abs() < 1e-6, "{other:?}");
        let nearer = Difference::between(&rows(&[0, 1, 2], 4.0), &cacheless);
        assert!(nearer.first_other_token.is_none() && nearer.logprob > 0.01, "{nearer:?}");
        let nothing = Difference::between(&[vec![f32::NAN; 3]], &cacheless);
        assert!(nothing.logprob.is_nan());
    }

    #[test]
    fn each_conclusion_follows_from_its_differences() {
        let difference = |first_other_token, logprob| Difference { first_other_token, logprob };
        let (same, tie) = (difference(None, 1e-5), difference(Some(3), 1e-4));
        let (far, none) = (difference(None, 0.02), difference(None, f64::NAN));
        let other = difference(Some(0), 2.0);
        let of = |reuse: [&Difference; 2], full| {
            Conclusion::of(&reuse, full, rounding(KvFormat::Dense(DType::F32)))
        };
        assert_eq!(of([&same, &same], &same), Conclusion::NotReuse);
        assert_eq!(of([&same, &tie], &other), Conclusion::DocumentsApart);
        for wrong in [&far, &none] {
            assert_eq!(of([&same, wrong], &same), Conclusion::CacheIsWrong);
            assert_eq!(of([wrong, &same], &other), Conclusion::CacheIsWrong);
        }
        let report = |conclusion| AnswersReport {
            conclusion,
            meaning: "",
            remedy: "",
            rounding: 0.01,
            answers: [same, far, same, same]
                .map(|difference| Answered {
                    way: "",
                    text: String::new(),
                    tokens: Vec::new(),
                    documents: 0,
                    found: 0,
                    difference,
                })
                .into(),
        };
        let wrong = report(Conclusion::CacheIsWrong).verdict();
        assert!(matches!(wrong, Err(Error::WrongCache { difference, .. }) if difference == far.logprob));
        report(Conclusion::DocumentsApart).verdict().unwrap();
        assert_eq!(
            Conclusion::of(&[&far], &same, rounding(KvFormat::Dense(DType::F16))),
            Conclusion::NotReuse
        );
    }
}
