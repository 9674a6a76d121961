//! Answer files: one JSON object per line, each with an answer and the name of its arm.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use kvlab::{Arm, Trial};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Writes every answer to a file.
pub(super) fn write(path: &Path, arms: &[Arm], trials: &[Trial]) -> Result<()> {
    #[derive(Serialize)]
    struct AnswerLine<'a> {
        name: String,
        #[serde(flatten)]
        trial: &'a Trial,
    }
    let write = || -> std::io::Result<()> {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        for trial in trials {
            let line = AnswerLine { name: arms[trial.arm].name(), trial };
            serde_json::to_writer(&mut file, &line).map_err(std::io::Error::from)?;
            writeln!(file)?;
        }
        file.flush()
    };
    write().map_err(|source| Error::Answers { path: path.to_owned(), source })
}

/// Reads answers from several files. If an arm has several answers to a question (every file contains full
/// attention's answers), only the first one is used.
pub(super) fn read(paths: &[PathBuf]) -> Result<(Vec<Arm>, Vec<Trial>)> {
    #[derive(Deserialize)]
    struct AnswerLine {
        name: String,
        #[serde(flatten)]
        trial: Trial,
    }
    let (mut arms, mut names, mut trials, mut known) = (Vec::new(), Vec::new(), Vec::new(), HashSet::new());
    for path in paths {
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::ReadAnswers { path: path.clone(), source })?;
        for (number, line) in text.lines().enumerate() {
            let bad = |reason: String| Error::Answer { path: path.clone(), line: number + 1, reason };
            let AnswerLine { name, trial } = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
            let found = names.iter().position(|known| *known == name);
            let arm = if let Some(arm) = found {
                arm
            } else {
                arms.push(name.parse::<Arm>().map_err(|e| bad(e.to_string()))?);
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
