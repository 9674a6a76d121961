//! `cargo xtask published --goldens`: answers of the published model against those of Hugging Face transformers.
//!
//! `proof/goldens/published_model` has prompts and goldens, and says how they are made. `kvc` answers each prompt twice: from the converted
//! directory in f32, where it must choose the same tokens (no golden has a tie), and from the GGUF file, whose blocks it multiplies as
//! they are stored. There the golden's answer is read back, so that a place counts by itself and not by what was chosen before it.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{FOLDER, folder, model, program};
use crate::run::{Result, cargo, root};
use crate::tools::{Tool, require};

/// The prompts, the goldens, and the program that converts the model.
const TOOLS: &str = "proof/goldens/published_model";

/// The packages that the program needs, and their folder below that of the model.
const PACKAGES: &str = "gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0";
const PYTHON: &str = "python";

/// The directory that the program makes, below the folder of the model, and the file that it writes last.
const DIRECTORY: &str = "hf";
const LAST: &str = "tokenizer_config.json";

/// What the comparison needs.
pub(crate) const NEEDS: &[Tool] = &[Tool::PublishedModel, Tool::PublishedDirectory];

/// The least share of places at which the GGUF file must have the golden's token.
const OF_FILE: f64 = 0.99;

#[derive(Deserialize)]
struct Prompts {
    prompts: Vec<Prompt>,
}

/// A prompt: a raw text, or a conversation.
#[derive(Deserialize)]
struct Prompt {
    name: String,
    text: Option<String>,
    messages: Option<Value>,
}

#[derive(Deserialize)]
struct Goldens {
    /// The end token of the model.
    end: u32,
    /// The largest difference of the reference's logits from those in double precision.
    #[cfg(test)]
    rounding: f64,
    answers: Vec<Golden>,
}

/// What transformers makes of a prompt.
#[derive(Deserialize)]
struct Golden {
    name: String,
    prompt: Vec<u32>,
    /// The tokens of the answer, with the end token.
    answer: Vec<u32>,
    /// By how much each of them is ahead of the second likeliest.
    margins: Vec<f64>,
}

/// What `kvc` says of a prompt.
#[derive(Deserialize)]
struct Said {
    tokens: Vec<u32>,
    finish: String,
    prompt_tokens: usize,
    read_back: Option<ReadBack>,
}

#[derive(Deserialize)]
struct ReadBack {
    prompt: Vec<u32>,
    likeliest: Vec<u32>,
}

/// Returns the path of the converted directory.
pub(crate) fn directory() -> PathBuf {
    folder().join(DIRECTORY)
}

/// Returns whether the converted directory is here.
pub(crate) fn is_here() -> bool {
    directory().join(LAST).is_file()
}

/// Returns the command that converts the model, which must be here.
pub(crate) fn bring() -> String {
    format!(
        "python3 -m pip install -q --target {FOLDER}/{PYTHON} {PACKAGES} && PYTHONPATH={FOLDER}/{PYTHON} python3 \
         {TOOLS}/convert.py {FOLDER}/smollm2.gguf {FOLDER}/{DIRECTORY}"
    )
}

pub(super) fn check() -> Result {
    require("`cargo xtask published --goldens`", NEEDS)?;
    cargo(&["build", "--release", "--quiet", "--workspace", "--all-features"])?;
    let prompts: Prompts = read("prompts.json")?;
    let Goldens { end, answers: goldens, .. } = read("goldens.json")?;
    let (mut places, mut equal, mut wrong) = (0, 0, Vec::new());
    println!(
        "{:<40} {:>6} {:>6} {:>9} {:>9} {:>6}",
        "prompt", "tokens", "answer", "directory", "file", "margin"
    );
    for (prompt, golden) in prompts.prompts.iter().zip(&goldens) {
        let all = golden.answer.len();
        let chosen = chosen(golden, end, ask(&directory(), prompt, all, None)?)?;
        if chosen < all {
            let ahead = golden.margins[chosen];
            wrong
                .push(format!("{:?} is left at {chosen}, where the golden is ahead by {ahead}", golden.name));
        }
        let read = read_back(golden, &ask(&model(), prompt, all, Some(&golden.answer))?)?;
        (places, equal) = (places + all, equal + read);
        let least = golden.margins.iter().copied().fold(f64::INFINITY, f64::min);
        let tokens = golden.prompt.len();
        println!("{:<40} {tokens:>6} {all:>6} {chosen:>9} {read:>9} {least:>6.3}", golden.name);
    }
    let share = equal as f64 / places as f64;
    println!("equal from the file: {equal} of {places} places, {:.2} %", 100.0 * share);
    if share < OF_FILE {
        wrong.push(format!("fewer than {:.0} % of places are equal from the file", 100.0 * OF_FILE));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

/// Returns the number of tokens that were chosen before one differs from the golden.
fn chosen(golden: &Golden, end: u32, said: Said) -> Result<usize> {
    if said.prompt_tokens != golden.prompt.len() {
        let tokens = said.prompt_tokens;
        return Err(format!("{:?} has {tokens} tokens, not {}", golden.name, golden.prompt.len()));
    }
    let ended = (said.finish == "stop").then_some(end);
    let tokens = said.tokens.into_iter().chain(ended);
    Ok(tokens.zip(&golden.answer).take_while(|(ours, theirs)| ours == *theirs).count())
}

/// Returns the number of places of the golden's answer, read back, at which its token is the likeliest.
fn read_back(golden: &Golden, said: &Said) -> Result<usize> {
    let read = said.read_back.as_ref().ok_or("`kvc run --answer` does not say what it read")?;
    if read.prompt != golden.prompt {
        return Err(format!("{:?} has other tokens than its golden", golden.name));
    }
    Ok(read.likeliest.iter().zip(&golden.answer).filter(|(ours, theirs)| ours == theirs).count())
}

/// Asks a model a prompt for so many tokens. If an answer is given, it is read back.
fn ask(model: &Path, prompt: &Prompt, tokens: usize, answer: Option<&[u32]>) -> Result<Said> {
    let asked = folder().join("prompt");
    let (option, text) = match (&prompt.text, &prompt.messages) {
        (Some(text), None) => ("--prompt-file", text.clone()),
        (None, Some(messages)) => ("--messages", messages.to_string()),
        _ => return Err(format!("{:?} is neither a text nor a conversation", prompt.name)),
    };
    std::fs::write(&asked, text).map_err(|e| format!("{}: {e}", asked.display()))?;
    let mut command = Command::new(program());
    command.args(["run", "--json", "--kv-memory", "1024", option]).arg(&asked).arg("--model").arg(model);
    command.args(["--max-new-tokens", &tokens.to_string()]);
    if let Some(answer) = answer {
        let ids: Vec<String> = answer.iter().map(u32::to_string).collect();
        command.args(["--answer", &ids.join(",")]);
    }
    let output = command.output().map_err(|e| format!("`kvc run` cannot be run: {e}"))?;
    if !output.status.success() {
        return Err(format!("{:?}: `kvc run` says {}", prompt.name, String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("{:?}: `kvc run` printed {e}", prompt.name))
}

/// Reads a file of the goldens' folder.
fn read<T: DeserializeOwned>(name: &str) -> Result<T> {
    let path = root().join(TOOLS).join(name);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_count_up_to_the_first_difference_and_places_by_themselves() {
        let golden =
            Golden { name: String::new(), prompt: vec![1], answer: vec![5, 6, 2], margins: vec![1.0; 3] };
        let said = |tokens: &[u32], finish: &str| Said {
            tokens: tokens.to_vec(),
            finish: finish.to_owned(),
            prompt_tokens: 1,
            read_back: Some(ReadBack { prompt: vec![1], likeliest: tokens.to_vec() }),
        };
        assert_eq!(chosen(&golden, 2, said(&[5, 6], "stop")), Ok(3));
        assert_eq!(chosen(&golden, 2, said(&[5, 6], "length")), Ok(2));
        assert_eq!(chosen(&golden, 2, said(&[9, 6], "stop")), Ok(0));
        assert_eq!(read_back(&golden, &said(&[9, 6, 2, 8], "length")), Ok(2));
        assert!(chosen(&Golden { prompt: vec![1, 1], ..golden }, 2, said(&[5], "length")).is_err());
    }

    #[test]
    fn every_prompt_has_its_golden_and_none_has_a_tie() {
        let (prompts, goldens): (Prompts, Goldens) =
            (read("prompts.json").unwrap(), read("goldens.json").unwrap());
        assert!(prompts.prompts.iter().map(|p| &p.name).eq(goldens.answers.iter().map(|g| &g.name)));
        let lengths = || goldens.answers.iter().map(|golden| golden.prompt.len());
        assert_eq!((lengths().count(), lengths().min(), lengths().max()), (16, Some(8), Some(6000)));
        for golden in &goldens.answers {
            assert_eq!(golden.answer.len(), golden.margins.len(), "{}", golden.name);
            assert!(golden.margins.iter().all(|&margin| margin > 20.0 * goldens.rounding), "{}", golden.name);
        }
    }
}
