//! Answer files. The first line holds the settings of the evaluation. Each other line holds an answer, the
//! name of its arm and the digest of its question.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use kvengine::{Engine, ResultFile};
use kvlab::{Arm, EvalOptions, Question, Trial};
use kvmodel::TextCodec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::args::EvalArgs;
use crate::error::{Error, Result};

/// The settings that answers depend on, apart from the arm and the question. Their names are options or
/// nearly so, because an error names the first one that differs.
type Settings = Map<String, Value>;

/// Returns the settings of an evaluation.
pub(super) fn settings(
    args: &EvalArgs,
    options: &EvalOptions,
    engine: &Engine,
    codec: &TextCodec,
) -> Settings {
    let word = |value: Option<clap::builder::PossibleValue>| value.map(|value| value.get_name().to_owned());
    let hex = |bytes: &[u8; 32]| blake3::Hash::from_bytes(*bytes).to_hex().to_string();
    let settings = json!({
        "model": hex(engine.model().identity()),
        "tokenizer": hex(codec.digest()),
        "chat": options.style.chat,
        "separator": options.style.separator,
        "decoys": digest(&options.style.decoys),
        "answer-tokens": options.answer_tokens,
        "measure": word(args.measure.to_possible_value()),
        "dtype": args.engine.dtype.to_string(),
        "keys": args.engine.keys.to_string(),
        "weights": word(args.engine.weights.to_possible_value()),
        "compute": args.engine.compute.to_string(),
        "backend": format!("{:?}", args.engine.backend).to_lowercase(),
    });
    if let Value::Object(settings) = settings { settings } else { Settings::new() }
}

/// Returns the first half of a hash of the value's JSON.
fn digest(value: &impl Serialize) -> String {
    let json = serde_json::to_vec(value).unwrap_or_default();
    blake3::hash(&json).to_hex()[..32].to_owned()
}

#[derive(Serialize, Deserialize)]
struct SettingsLine {
    settings: Settings,
}

#[derive(Serialize)]
struct NewAnswer<'a> {
    name: &'a str,
    asked: &'a str,
    #[serde(flatten)]
    trial: &'a Trial,
}

#[derive(Deserialize)]
struct KnownAnswer {
    name: String,
    asked: Option<String>,
    #[serde(flatten)]
    trial: Trial,
}

/// An answer file that an evaluation starts or continues.
pub(super) struct AnswerFile {
    file: File,
    /// The names of the arms.
    names: Vec<String>,
    /// The index of the first draw.
    first: usize,
    /// The digests of the questions in each draw.
    asked: Vec<Vec<String>>,
}

impl AnswerFile {
    /// Starts or continues a file. Returns its answers to these questions by these arms. An incomplete last line
    /// is removed.
    pub(super) fn open(
        file: ResultFile,
        settings: &Settings,
        arms: &[Arm],
        (first, questions): (usize, &[Vec<Question>]),
    ) -> Result<(Self, Vec<Trial>)> {
        let path = &file.path().to_owned();
        let failed = |source| Error::Answers { path: path.clone(), source };
        let names = arms.iter().map(Arm::name).collect();
        let asked = questions.iter().map(|draw| draw.iter().map(digest).collect()).collect();
        let text = if path.is_file() { complete(path)? } else { String::new() };
        let file = file.into_appended().map_err(failed)?;
        if path.is_file() {
            file.set_len(text.len() as u64).map_err(failed)?;
        }
        let mut answers = Self { file, names, first, asked };
        let Some(line) = text.lines().next() else {
            write(&mut answers.file, &SettingsLine { settings: settings.clone() }).map_err(failed)?;
            return Ok((answers, Vec::new()));
        };
        let other = |reason| Error::OtherAnswers { path: path.clone(), reason };
        let known: SettingsLine = serde_json::from_str(line)
            .map_err(|_| other("its first line does not contain settings".to_owned()))?;
        for (name, ours) in settings {
            let theirs = known.settings.get(name).unwrap_or(&Value::Null);
            if theirs != ours {
                return Err(other(format!("its {name} is {theirs}, not {ours}")));
            }
        }
        let known = answers.known(path, &text)?;
        Ok((answers, known))
    }

    /// Returns the answers in a file to these questions by these arms.
    fn known(&self, path: &Path, text: &str) -> Result<Vec<Trial>> {
        let mut known = Vec::new();
        for answer in lines(path, text) {
            let (_, KnownAnswer { name, asked, trial }) = answer?;
            let draw = trial.draw.checked_sub(self.first).and_then(|draw| self.asked.get(draw));
            let Some(question) = draw.and_then(|draw| draw.get(trial.question)) else { continue };
            if asked.as_ref() != Some(question) {
                let Trial { draw, question, .. } = trial;
                let reason = format!("question {question} of draw {draw} is not the one that it answers");
                return Err(Error::OtherAnswers { path: path.to_owned(), reason });
            }
            let arms = self.names.iter().enumerate().filter(|(_, known)| **known == name);
            known.extend(arms.map(|(arm, _)| Trial { arm, ..trial.clone() }));
        }
        Ok(known)
    }

    /// Writes an answer.
    pub(super) fn add(&mut self, trial: &Trial) -> std::io::Result<()> {
        let asked = &self.asked[trial.draw - self.first][trial.question];
        write(&mut self.file, &NewAnswer { name: &self.names[trial.arm], asked, trial })
    }
}

/// Writes a line with a single call, so that all complete lines are valid if the program is killed.
fn write(file: &mut File, line: &impl Serialize) -> std::io::Result<()> {
    let mut json = serde_json::to_vec(line)?;
    json.push(b'\n');
    file.write_all(&json)
}

/// Reads a file without its last line if that line is incomplete.
fn complete(path: &Path) -> Result<String> {
    let failed = |source| Error::ReadAnswers { path: path.to_owned(), source };
    let mut bytes = kvmodel::read_small_file(path).map_err(failed)?;
    let end = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    if end < bytes.len() {
        note!("{}: the last line is incomplete and was dropped", path.display());
        bytes.truncate(end);
    }
    String::from_utf8(bytes).map_err(|error| failed(std::io::Error::other(error)))
}

/// Returns the answers in a file, each with its line number, without the line of settings.
fn lines<'a>(path: &'a Path, text: &'a str) -> impl Iterator<Item = Result<(usize, KnownAnswer)>> + 'a {
    let answers =
        text.lines().zip(1..).filter(|(line, _)| serde_json::from_str::<SettingsLine>(line).is_err());
    answers.map(|(text, line)| match serde_json::from_str(text) {
        Ok(answer) => Ok((line, answer)),
        Err(error) => Err(Error::Answer { path: path.to_owned(), line, reason: error.to_string() }),
    })
}

/// Reads answers from several files. If an arm has several answers to a question (every file contains full
/// attention's answers), only the first one is used.
pub(super) fn read(paths: &[PathBuf]) -> Result<(Vec<Arm>, Vec<Trial>)> {
    let (mut arms, mut names, mut trials, mut known) = (Vec::new(), Vec::new(), Vec::new(), HashSet::new());
    for path in paths {
        for answer in lines(path, &complete(path)?) {
            let (line, KnownAnswer { name, trial, .. }) = answer?;
            let found = names.iter().position(|known| *known == name);
            let arm = if let Some(arm) = found {
                arm
            } else {
                let bad = |error: kvlab::Error| Error::Answer {
                    path: path.clone(),
                    line,
                    reason: error.to_string(),
                };
                arms.push(name.parse::<Arm>().map_err(bad)?);
                names.push(name);
                arms.len() - 1
            };
            if known.insert((arm, trial.draw, trial.question)) {
                trials.push(Trial { arm, ..trial });
            }
        }
    }
    if trials.is_empty() { Err(Error::NoAnswers) } else { Ok((arms, trials)) }
}
