//! The fields that requests for chats and for completions have in common.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvengine::Sampling;
use kvmodel::Variable;
use serde::Deserialize;

use crate::ask::{AnswerSettings, Documents, Owner};
use crate::dialect::documents::documents;
use crate::dialect::random;
use crate::refusal::Refusal;

/// The most strings of `stop`.
const MAX_STOP: usize = 16;
/// The most bytes of a string of `stop`. Each token of an answer is compared with the beginnings of each string.
const MAX_STOP_BYTES: usize = 256;
/// The most likely tokens that a request may ask for at each position.
pub(crate) const MAX_LOGPROBS: usize = 20;
/// The most entries of `logit_bias`.
const MAX_BIAS: usize = 1024;

// Decision: docs/decisions/serve.md#unknown-fields-are-refused
/// Defines a request with its own fields and the common ones. Every other field is refused.
macro_rules! openai_request {
    ($(#[$meta:meta])* struct $name:ident { $($(#[$field_meta:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct $name {
            $($(#[$field_meta])* $field: $kind,)*
            model: Option<String>,
            temperature: Option<f32>,
            top_p: Option<f32>,
            top_k: Option<i64>,
            min_p: Option<f32>,
            presence_penalty: Option<f32>,
            frequency_penalty: Option<f32>,
            repetition_penalty: Option<f32>,
            seed: Option<i64>,
            n: Option<u64>,
            max_tokens: Option<u64>,
            stop: Option<kvmodel::Variable>,
            logit_bias: Option<std::collections::BTreeMap<String, f32>>,
            ignore_eos: Option<bool>,
            stream: Option<bool>,
            stream_options: Option<crate::dialect::openai::fields::StreamOptions>,
            priority: Option<i32>,
            documents: Option<kvmodel::Variable>,
            separator: Option<String>,
            registered_documents: Option<bool>,
            cache_salt: Option<String>,
            prompt_cache_key: Option<String>,
            // Fields that do not change an answer of this server.
            #[allow(dead_code, reason = "the label of a user changes nothing")]
            user: Option<serde::de::IgnoredAny>,
        }

        impl $name {
            /// Returns the common fields.
            fn common(&mut self) -> crate::dialect::openai::fields::Common {
                crate::dialect::openai::fields::Common {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    seed: self.seed,
                    n: self.n,
                    max_tokens: self.max_tokens,
                    stop: self.stop.take(),
                    logit_bias: self.logit_bias.take(),
                    ignore_eos: self.ignore_eos,
                    priority: self.priority,
                    documents: self.documents.take(),
                    separator: self.separator.take(),
                    registered_documents: self.registered_documents,
                    cache_salt: self.cache_salt.take(),
                    prompt_cache_key: self.prompt_cache_key.take(),
                }
            }
        }
    };
}
pub(super) use openai_request;

/// The options of a stream.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
    /// Padding against observers of the network, which a proxy with TLS may add.
    #[allow(dead_code, reason = "padding changes no answer")]
    include_obfuscation: Option<serde::de::IgnoredAny>,
}

/// The common fields.
#[derive(Debug)]
pub(crate) struct Common {
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) top_k: Option<i64>,
    pub(super) min_p: Option<f32>,
    pub(super) presence_penalty: Option<f32>,
    pub(super) frequency_penalty: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) seed: Option<i64>,
    pub(super) n: Option<u64>,
    pub(super) max_tokens: Option<u64>,
    pub(super) stop: Option<Variable>,
    pub(super) logit_bias: Option<BTreeMap<String, f32>>,
    pub(super) ignore_eos: Option<bool>,
    pub(super) priority: Option<i32>,
    pub(super) documents: Option<Variable>,
    pub(super) separator: Option<String>,
    pub(super) registered_documents: Option<bool>,
    pub(super) cache_salt: Option<String>,
    pub(super) prompt_cache_key: Option<String>,
}

impl Common {
    /// Returns the settings of the answer. `newer` is a limit on its tokens under a newer name, which counts before the one
    /// under the older name. Without both, `default` holds.
    ///
    /// # Errors
    /// Refuses values out of range, by the name of their field.
    pub(super) fn settings(
        &self,
        newer: Option<u64>,
        default: Option<u64>,
        logprobs: Option<usize>,
    ) -> Result<AnswerSettings, Refusal> {
        let neutral = Sampling::default();
        let sampling = Sampling {
            temperature: within("temperature", self.temperature, 1.0, 0.0..=2.0)?,
            top_p: within("top_p", self.top_p, 1.0, f32::MIN_POSITIVE..=1.0)?,
            top_k: top_k(self.top_k)?,
            min_p: within("min_p", self.min_p, neutral.min_p, 0.0..=1.0)?,
            repetition_penalty: within(
                "repetition_penalty",
                self.repetition_penalty,
                neutral.repetition_penalty,
                f32::MIN_POSITIVE..=100.0,
            )?,
            presence_penalty: within("presence_penalty", self.presence_penalty, 0.0, -2.0..=2.0)?,
            frequency_penalty: within("frequency_penalty", self.frequency_penalty, 0.0, -2.0..=2.0)?,
            seed: self.seed.map_or_else(random, |seed| seed as u64),
        };
        for (name, given) in [("max_completion_tokens", newer), ("max_tokens", self.max_tokens)] {
            if given == Some(0) {
                return Err(Refusal::field(name, format!("{name} is 0; it must be at least 1")));
            }
        }
        let max_tokens = newer.or(self.max_tokens).or(default);
        let samples = self.n.unwrap_or(1);
        if samples == 0 {
            return Err(Refusal::field("n", "n is 0; it must be at least 1"));
        }
        Ok(AnswerSettings {
            max_tokens: max_tokens.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            samples: usize::try_from(samples).unwrap_or(usize::MAX),
            sampling,
            stop: stop("stop", self.stop.as_ref())?,
            logprobs,
            logit_bias: bias(self.logit_bias.as_ref())?,
            ignore_end: self.ignore_eos.unwrap_or(false),
        })
    }

    /// Returns the documents beside the prompt and the separator.
    pub(super) fn take_documents(&mut self) -> Result<Documents, Refusal> {
        let given = documents(self.documents.take().as_ref())?;
        let ignore_registered = self.registered_documents == Some(false);
        Ok(Documents { given, separator: self.separator.take(), from_parts: false, ignore_registered })
    }

    /// Returns the tenant with the salt of the request.
    pub(super) fn owner(&self, owner: Owner) -> Result<Owner, Refusal> {
        Ok(Owner { salt: salt(self.cache_salt.as_deref())?, ..owner })
    }

    /// Returns the label for metrics and the log.
    pub(super) fn label(&mut self) -> Option<Arc<str>> {
        self.prompt_cache_key.take().map(Arc::from)
    }

    /// Returns the engine's priority. Clients of vLLM give smaller numbers to what is more urgent.
    pub(super) fn priority(&self) -> i32 {
        self.priority.unwrap_or(0).saturating_neg()
    }
}

/// Returns a salt.
///
/// # Errors
/// Refuses an empty or a very long one.
pub(crate) fn salt(given: Option<&str>) -> Result<Option<Arc<[u8]>>, Refusal> {
    match given {
        None => Ok(None),
        Some(salt) if salt.is_empty() || salt.len() > 256 => {
            Err(Refusal::field("cache_salt", "cache_salt must have 1 to 256 bytes"))
        }
        Some(salt) => Ok(Some(salt.as_bytes().into())),
    }
}

/// Returns a number within a range.
pub(crate) fn within(
    name: &'static str,
    given: Option<f32>,
    default: f32,
    range: std::ops::RangeInclusive<f32>,
) -> Result<f32, Refusal> {
    let value = given.unwrap_or(default);
    if range.contains(&value) {
        return Ok(value);
    }
    let (from, to) = (range.start(), range.end());
    let bounds = if *from == f32::MIN_POSITIVE {
        format!("more than 0 and at most {to}")
    } else {
        format!("from {from} to {to}")
    };
    Err(Refusal::field(name, format!("{name} is {value}; it must be {bounds}")))
}

/// Returns the number of tokens to draw from. -1 means all, as in vLLM.
pub(crate) fn top_k(given: Option<i64>) -> Result<usize, Refusal> {
    match given {
        None | Some(-1) => Ok(0),
        Some(k) => usize::try_from(k).map_err(|_| {
            Refusal::field("top_k", format!("top_k is {k}; it must be at least 1, or -1 or 0 for all tokens"))
        }),
    }
}

/// Returns the strings of a field that is a string or a list of strings.
pub(crate) fn stop(name: &str, given: Option<&Variable>) -> Result<Vec<String>, Refusal> {
    let wrong = |reason: &str| Err(Refusal::field(name, format!("{name} {reason}")));
    let texts = match given {
        None | Some(Variable::None) => return Ok(Vec::new()),
        Some(Variable::Text(text)) => vec![text.clone()],
        Some(Variable::List(list)) => {
            let text = |one: &Variable| match one {
                Variable::Text(text) => Some(text.clone()),
                _ => None,
            };
            match list.iter().map(text).collect() {
                Some(texts) => texts,
                None => return wrong("must be a string or a list of strings"),
            }
        }
        Some(_) => return wrong("must be a string or a list of strings"),
    };
    match () {
        () if texts.len() > MAX_STOP => {
            wrong(&format!("has {} strings; it may have up to {MAX_STOP}", texts.len()))
        }
        () if texts.iter().any(|text| text.len() > MAX_STOP_BYTES) => {
            wrong(&format!("has a string of more than {MAX_STOP_BYTES} bytes; shorten it"))
        }
        () if texts.iter().any(String::is_empty) => {
            wrong("has an empty string, which would end every answer immediately; remove it")
        }
        () => Ok(texts),
    }
}

fn bias(given: Option<&BTreeMap<String, f32>>) -> Result<Arc<[(u32, f32)]>, Refusal> {
    let Some(given) = given else { return Ok(Arc::default()) };
    if given.len() > MAX_BIAS {
        let reason = format!("logit_bias has {} tokens; it may have up to {MAX_BIAS}", given.len());
        return Err(Refusal::field("logit_bias", reason));
    }
    let one = |(token, &bias): (&String, &f32)| {
        let place = format!("logit_bias.{token}");
        let id = token.parse::<u32>().map_err(|_| {
            Refusal::field(
                place.clone(),
                format!("logit_bias names {token:?}, which is not the number of a token"),
            )
        })?;
        if !(-100.0..=100.0).contains(&bias) {
            let reason = format!("the bias of token {token} is {bias}; it must be from -100 to 100");
            return Err(Refusal::field(place, reason));
        }
        Ok((id, bias))
    };
    given.iter().map(one).collect()
}
