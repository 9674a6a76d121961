//! `cargo xtask published --goldens`: compares the published model's answers with Hugging Face
//! transformers' answers.
//!
//! `proof/goldens/published_model` holds the prompts and goldens, and explains how they are made. `kvc`
//! answers each prompt twice. With the converted directory in f32, it must choose the same tokens (no golden
//! has a tie). With the GGUF file, it multiplies the blocks as stored. There it is fed the golden's answer,
//! so each position is judged on its own, whatever token was chosen before it.
//!
//! `cargo xtask published --gemma` compares Gemma 3 270M's answers, from its GGUF file, with llama.cpp's answers
//! (`gemma3.json`), in both ways.

use std::path::Path;
use std::process::Command;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use xtask::published::{GEMMA, GOLDENS, NEEDS, directory, folder, gemma, model};
use xtask::run::{self, Result, root};
use xtask::tools::require;

use super::{build, program};

/// The minimum share of positions where the GGUF file must predict the golden's token.
const OF_FILE: f64 = 0.99;

#[derive(Deserialize)]
struct PromptFile {
    prompts: Vec<Prompt>,
}

/// A prompt: raw text or a conversation.
#[derive(Deserialize)]
struct Prompt {
    name: String,
    text: Option<String>,
    messages: Option<Value>,
}

#[derive(Deserialize)]
struct GoldenFile {
    /// The model's end token.
    end: u32,
    /// The maximum number of characters of a prompt, if longer texts are cut.
    characters: Option<usize>,
    /// The largest difference between the reference's logits and double-precision logits.
    #[cfg(test)]
    #[serde(default)]
    rounding: f64,
    answers: Vec<Golden>,
}

/// The answer that transformers gives to a prompt.
#[derive(Deserialize)]
struct Golden {
    name: String,
    prompt: Vec<u32>,
    /// The tokens of the answer, including the end token.
    answer: Vec<u32>,
    /// For each token, the difference between its logit and the second largest logit.
    margins: Vec<f64>,
}

/// The answer that `kvc` gives to a prompt.
#[derive(Deserialize)]
struct KvcAnswer {
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

pub(super) fn check() -> Result {
    require("`cargo xtask published --goldens`", NEEDS)?;
    build()?;
    let prompts: PromptFile = read("prompts.json")?;
    let GoldenFile { end, answers: goldens, .. } = read("goldens.json")?;
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

/// Compares Gemma's tokens with llama.cpp's: the prompts' and the answers'.
pub(super) fn check_gemma() -> Result {
    require("`cargo xtask published --gemma`", &[GEMMA])?;
    build()?;
    let prompts: PromptFile = read("prompts.json")?;
    let GoldenFile { end, characters, answers: goldens, .. } = read("gemma3.json")?;
    let mut wrong = Vec::new();
    println!("{:<40} {:>6} {:>6} {:>9} {:>9}", "prompt", "tokens", "answer", "chosen", "in place");
    for golden in &goldens {
        let prompt = prompts.prompts.iter().find(|prompt| prompt.name == golden.name);
        let text = prompt.and_then(|prompt| prompt.text.as_ref());
        let text = text.ok_or_else(|| format!("{:?} is no text in prompts.json", golden.name))?;
        let text = text.chars().take(characters.unwrap_or(usize::MAX)).collect();
        let prompt = &Prompt { name: golden.name.clone(), text: Some(text), messages: None };
        let all = golden.answer.len();
        let chosen = chosen(golden, end, ask(&gemma(), prompt, all, None)?)?;
        let read = read_back(golden, &ask(&gemma(), prompt, all, Some(&golden.answer))?)?;
        println!("{:<40} {:>6} {all:>6} {chosen:>9} {read:>9}", golden.name, golden.prompt.len());
        if (chosen, read) != (all, all) {
            wrong.push(format!("{:?} has {chosen} and {read} of {all} tokens", golden.name));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

/// Returns the number of tokens chosen before the first that differs from the golden.
fn chosen(golden: &Golden, end: u32, said: KvcAnswer) -> Result<usize> {
    if said.prompt_tokens != golden.prompt.len() {
        let tokens = said.prompt_tokens;
        return Err(format!("{:?} has {tokens} tokens, not {}", golden.name, golden.prompt.len()));
    }
    let ended = (said.finish == "stop").then_some(end);
    let tokens = said.tokens.into_iter().chain(ended);
    Ok(tokens.zip(&golden.answer).take_while(|(ours, theirs)| ours == *theirs).count())
}

/// Returns the number of positions where the golden's token is the most likely one, given the golden's
/// earlier tokens.
fn read_back(golden: &Golden, said: &KvcAnswer) -> Result<usize> {
    let read = said.read_back.as_ref().ok_or("`kvc run --answer` does not report what it read")?;
    if read.prompt != golden.prompt {
        return Err(format!("{:?} has other tokens than its golden", golden.name));
    }
    Ok(read.likeliest.iter().zip(&golden.answer).filter(|(ours, theirs)| ours == theirs).count())
}

/// Asks a model to answer a prompt with at most `tokens` tokens, or feeds it a given answer.
fn ask(model: &Path, prompt: &Prompt, tokens: usize, answer: Option<&[u32]>) -> Result<KvcAnswer> {
    let asked = folder().join("prompt");
    let (option, text) = match (&prompt.text, &prompt.messages) {
        (Some(text), None) => ("--prompt-file", text.clone()),
        (None, Some(messages)) => ("--messages", messages.to_string()),
        _ => return Err(format!("{:?} is neither a string nor a conversation", prompt.name)),
    };
    run::write(&asked, &text)?;
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

/// Reads a file in the goldens' folder.
fn read<T: DeserializeOwned>(name: &str) -> Result<T> {
    let path = root().join(GOLDENS).join(name);
    let text = run::read(&path)?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_count_up_to_the_first_difference_and_places_by_themselves() {
        let golden =
            Golden { name: String::new(), prompt: vec![1], answer: vec![5, 6, 2], margins: vec![1.0; 3] };
        let said = |tokens: &[u32], finish: &str| KvcAnswer {
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
    fn goldens_of_gemma_reach_past_its_window_and_none_has_a_tie() {
        let (prompts, goldens): (PromptFile, GoldenFile) =
            (read("prompts.json").unwrap(), read("gemma3.json").unwrap());
        let named = |golden: &Golden| prompts.prompts.iter().any(|prompt| prompt.name == golden.name);
        assert!(goldens.answers.iter().all(named));
        assert_eq!(goldens.answers.iter().filter(|golden| golden.answer.len() == 48).count(), 3);
        assert!(goldens.answers.iter().any(|golden| golden.answer.len() == 48 && golden.prompt.len() > 512));
        let margins = || goldens.answers.iter().flat_map(|golden| &golden.margins);
        assert!(margins().all(|&margin| margin > 1e-3), "{:?}", margins().copied().reduce(f64::min));
    }

    #[test]
    fn every_prompt_has_its_golden_and_none_has_a_tie() {
        let (prompts, goldens): (PromptFile, GoldenFile) =
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
