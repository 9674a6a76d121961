//! Creates the engine for `kvc eval`, `kvc tune` and `kvc doctor answers`, and the questions and the evaluation options
//! for the first two.

use std::path::Path;

use kvchunk::ChunkCacheConfig;
use kvengine::{BUILT_IN_DECOYS, Engine, EngineConfig};
use kvlab::{EvalOptions, PromptStyle, Question, Texts, World};
use kvmodel::{ModelDirectory, TextCodec};

use crate::args::{AskingArgs, EngineArgs};
use crate::backend::{HostSteps, OpenedBackend};
use crate::error::{Error, Result};
use crate::{backend, decoys, embedded, load};

/// Loads the model to ask, with its caches: the built-in model if there is no path.
pub(crate) fn engine(model: Option<&Path>, args: &EngineArgs) -> Result<(Engine, TextCodec)> {
    let OpenedBackend { backend, dense } =
        backend::open(&args.backend, HostSteps { compute: args.compute, ..HostSteps::default() })?;
    let ModelDirectory { model, codec, .. } = load::model(model, args.weights, dense)?;
    let config = EngineConfig {
        kv_format: args.dtype,
        keys: args.keys,
        kv_memory: args.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
        chunks: ChunkCacheConfig { memory_share: 0.5, ..ChunkCacheConfig::default() },
        ..EngineConfig::default()
    };
    let engine = Engine::new(model, backend, codec.digest(), &config)?;
    Ok((engine, codec))
}

/// Returns the evaluation options, except for the quantity to measure, which the command sets.
pub(crate) fn options(asking: &AskingArgs) -> Result<EvalOptions> {
    let separator = match &asking.separator {
        Some(text) => text.replace("\\n", "\n"),
        None if asking.chat => "\n\n".to_owned(),
        None => String::new(),
    };
    let built_in = BUILT_IN_DECOYS.map(str::to_owned);
    let decoys = match (&asking.decoys[..], asking.texts) {
        ([], Some(documents)) => Texts::new(documents).of(asking.form.into()).decoys(),
        ([name], _) if name.as_os_str() == "built-in" => built_in.to_vec(),
        (paths, _) => decoys::read(paths, &built_in)?,
    };
    Ok(EvalOptions {
        style: PromptStyle { chat: asking.chat, separator, decoys },
        answer_tokens: asking.answer_tokens,
        first_draw: asking.first_seed,
        ..EvalOptions::default()
    })
}

/// The default number of questions of each kind per draw for a command that only counts right answers.
pub(crate) const SHOWN: usize = 20;
/// The default number of questions of each kind per draw for a command that judges a loss. Five draws of this
/// many questions are enough to show that the loss is at most two percentage points, provided that none was
/// measured.
pub(crate) const JUDGED: usize = 30;
/// The number of notes per prompt if the model's directory has no questions.
const NOTES: usize = 2;

/// Returns the questions for each seed. If the options do not set the number of questions of each kind, it is
/// `usual`.
pub(crate) fn questions(asking: &AskingArgs, usual: usize) -> Result<Vec<Vec<Question>>> {
    let mut draws = drawn(asking, asking.questions.unwrap_or(usual))?;
    draws.retain(|questions| !questions.is_empty());
    if draws.is_empty() { Err(Error::NoKind) } else { Ok(draws) }
}

/// Returns the index of the first question whose documents or system prompt contain the separator, and the
/// name of the field that contains it. A separator of only white space is never reported.
fn holding(questions: &[Question], separator: &str) -> Option<(usize, String)> {
    let separator = separator.trim();
    let holds = |(at, question): (usize, &Question)| {
        let documents =
            question.documents.iter().enumerate().map(|(i, text)| (format!("documents[{i}]"), text));
        let mut parts = documents.chain([("system".to_owned(), &question.system)]);
        parts.find(|(_, text)| text.contains(separator)).map(|(field, _)| (at, field))
    };
    if separator.is_empty() { None } else { questions.iter().enumerate().find_map(holds) }
}

/// Returns the questions of the requested kinds for each seed. The list for a seed may be empty.
fn drawn(asking: &AskingArgs, per_kind: usize) -> Result<Vec<Vec<Question>>> {
    let in_model = |name: &str| asking.model.as_ref().map(|dir| dir.join(name)).filter(|path| path.exists());
    let read = |path: &Path| {
        crate::text_file::read(path).map_err(|source| Error::Dataset { path: path.to_owned(), source })
    };
    let graded = |questions: Vec<Question>| -> Vec<Question> {
        let grade = |question: Question| match asking.grader {
            Some(grader) => Question { grader, ..question },
            None => question,
        };
        let asked = |question: &Question| asking.kinds.is_empty() || asking.kinds.contains(&question.kind);
        questions.into_iter().filter(asked).map(grade).collect()
    };
    let first = asking.first_seed as u64;
    let seeds = first..first + asking.seeds as u64;
    let texts = |documents: usize| {
        let kinds = if asking.kinds.is_empty() { &Texts::KINDS[..] } else { &asking.kinds };
        let texts = Texts::new(documents).of(asking.form.into()).with_length(asking.length);
        let draw = |seed| graded(texts.questions_of(kinds, seed, per_kind));
        seeds.clone().map(draw).collect()
    };
    if let Some(documents) = asking.texts {
        return Ok(texts(documents));
    }
    if let Some(path) = asking.dataset.clone().or_else(|| in_model("dataset.jsonl")) {
        let text = read(&path)?;
        let mut all = Question::read_all(&text, asking.grader)
            .map_err(|source| Error::Questions { path: path.clone(), source })?;
        if let Some((at, field)) = holding(&all, &options(asking)?.style.separator) {
            let mut lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
            let line = lines.nth(at).map_or(0, |(_, line)| line);
            return Err(Error::Separator { path, line, field });
        }
        all = graded(all);
        all.truncate(asking.questions.unwrap_or(usize::MAX));
        // Each part takes every n-th question of the dataset, to make the parts similar.
        let part = |seed: usize| all.iter().skip(seed).step_by(asking.seeds).cloned().collect::<Vec<_>>();
        return Ok((0..asking.seeds).map(part).collect());
    }
    let world = match (&asking.model, in_model("world.json")) {
        (None, _) => World::from_json(embedded::WORLD)?,
        (Some(_), Some(path)) => World::from_json(&read(&path)?)?,
        (Some(_), None) => {
            note!(
                "no --dataset was given, so the questions are about {NOTES} invented notes (--texts N asks about N notes)"
            );
            return Ok(texts(NOTES));
        }
    };
    Ok(seeds.map(|seed| graded(world.questions(seed, per_kind))).collect())
}
