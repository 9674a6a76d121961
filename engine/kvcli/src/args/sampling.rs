//! Options of `kvc run` for choosing an answer's tokens and for ending the answer.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kvengine::{BeamSearch, Sampling, SparseDecode};

use super::number;

/// Options for choosing an answer's tokens and for ending the answer.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    #[command(flatten)]
    pub(crate) form: FormArgs,

    /// Maximum number of tokens in the answer.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_new_tokens: usize,

    /// End the answer before this string. May be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = stop)]
    pub(crate) stop: Vec<String>,

    /// Temperature. 0 chooses the most likely token; above 0, tokens are drawn at random.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f32,

    /// Draw only from the K most likely tokens; 0 draws from all.
    #[arg(long, value_name = "K", default_value_t = 0, allow_negative_numbers = true)]
    top_k: usize,

    /// Draw only from the smallest set of most likely tokens whose total probability reaches P; 1 draws from
    /// all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = top_p, allow_negative_numbers = true)]
    top_p: f32,

    /// Draw only from tokens at least P times as likely as the most likely one; 0 draws from all.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = min_p, allow_negative_numbers = true)]
    min_p: f32,

    /// Penalty for tokens that occur in the prompt or the answer. Values above 1 make these tokens less
    /// likely; 1 changes nothing.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = super::positive, allow_negative_numbers = true)]
    repetition_penalty: f32,

    /// Lower the logit of each token that occurs in the answer by X; 0 changes nothing.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = finite, allow_negative_numbers = true)]
    presence_penalty: f32,

    /// Lower the logit of a token by X for each time that it occurs in the answer; 0 changes nothing.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = finite, allow_negative_numbers = true)]
    frequency_penalty: f32,

    /// Add a number to a token's logit, as in `504=-5`; `504=-inf` excludes the token. May be repeated.
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,

    /// Search for the most likely whole answer with N beams; 1 chooses the answer token by token.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::at_least_one)]
    beams: usize,

    /// Length penalty of --beams: an answer's log-probability is divided by its length to this power. Larger
    /// values prefer longer answers.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = finite, allow_negative_numbers = true)]
    length_penalty: f32,

    /// Guess up to N tokens in each step: the tokens that followed an earlier occurrence of the last tokens.
    /// The answer does not change. Saves time if answers quote their documents. 0 turns guessing off.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) lookup: usize,

    /// Let each token of the answer attend only to the N most relevant blocks of a long context in each
    /// layer. Faster, but approximate. N must be at least 4. Default: all blocks.
    #[arg(long, value_name = "N")]
    pages: Option<usize>,

    /// Report the log-probability of each answer token, and of the N most likely tokens at the same
    /// position, in the output of --json.
    #[arg(long, value_name = "N", requires = "json")]
    pub(crate) logprobs: Option<usize>,

    /// Random seed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Score this answer instead of choosing one: token ids, as in `504,2988`. With this option, the
    /// output of --json contains, under `read_back`, the ids of the prompt's tokens and the most likely
    /// token at each position.
    #[arg(long, value_name = "IDS", value_delimiter = ',', requires = "json", conflicts_with_all = ["temperature", "stop"])]
    answer: Vec<u32>,
}

/// Options for the form of the answer.
#[derive(Debug, Args)]
#[group(multiple = false, conflicts_with_all = ["beams", "answer"])]
pub(crate) struct FormArgs {
    /// File with a JSON schema. The answer is JSON that matches the schema, unless --max-new-tokens cuts it off. `{}`
    /// allows any JSON.
    #[arg(long = "answer-schema", value_name = "FILE")]
    pub(crate) schema: Option<PathBuf>,

    /// Regular expression that the whole answer matches, as in `(yes|no)`.
    #[arg(long = "answer-regex", value_name = "REGEX", allow_hyphen_values = true)]
    pub(crate) regex: Option<String>,

    /// File with a context-free grammar in Lark's syntax, to which the answer conforms.
    #[arg(long = "answer-grammar", value_name = "FILE")]
    pub(crate) grammar: Option<PathBuf>,
}

impl SamplingArgs {
    /// Returns the settings for beam search, or `None` if it was not requested.
    pub(crate) fn beams(&self) -> Option<BeamSearch> {
        let search = BeamSearch { width: self.beams, length_penalty: self.length_penalty };
        Some(search).filter(|search| search.width > 1)
    }

    /// Returns the settings for sparse decode, or `None` if it was not requested.
    pub(crate) fn sparse(&self) -> Option<SparseDecode> {
        self.pages.map(SparseDecode::new)
    }

    /// Returns the sampling settings.
    pub(crate) fn settings(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        }
    }

    /// Returns the answer to score instead of choosing one, or `None` if none was given.
    pub(crate) fn answer(&self) -> Option<Arc<[u32]>> {
        (!self.answer.is_empty()).then(|| self.answer.as_slice().into())
    }

    /// Returns an error message if a filter was given but has no effect, because the most likely token is
    /// always chosen.
    pub(crate) fn without_effect(&self) -> Option<&'static str> {
        if self.temperature > 0.0 {
            return None;
        }
        let neutral = Sampling::default();
        [
            (self.top_k != neutral.top_k, "--top-k has no effect at temperature 0; add --temperature"),
            (self.top_p != neutral.top_p, "--top-p has no effect at temperature 0; add --temperature"),
            (self.min_p != neutral.min_p, "--min-p has no effect at temperature 0; add --temperature"),
        ]
        .into_iter()
        .find_map(|(given, what)| given.then_some(what))
    }
}

fn stop(text: &str) -> Result<String, String> {
    if text.is_empty() {
        Err("an empty string would end every answer immediately".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, |&t: &f32| t.is_finite() && t >= 0.0, "a number, 0 or more")
}

fn top_p(text: &str) -> Result<f32, String> {
    number(text, |&p| p > 0.0 && p <= 1.0, "a number above 0 and at most 1")
}

fn finite(text: &str) -> Result<f32, String> {
    number(text, |x: &f32| x.is_finite(), "a number")
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parts =
        text.split_once('=').and_then(|(id, x)| Some((id.trim().parse().ok()?, x.trim().parse().ok()?)));
    let number = parts.filter(|(_, x): &(u32, f32)| !x.is_nan());
    number.ok_or_else(|| "must be a token ID and a number, such as 504=-5".to_owned())
}

fn min_p(text: &str) -> Result<f32, String> {
    number(text, |p| (0.0..=1.0).contains(p), "a number from 0 to 1")
}
