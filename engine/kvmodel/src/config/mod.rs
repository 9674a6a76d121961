//! Parses the config.json of Hugging Face transformers, versions 4 and 5.

use kvcore::{KvExtents, KvFormat, Pairing, RopeConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};

mod deepseek;
mod gemma3;
mod quantised;
mod rope;
mod window;

pub use deepseek::{ExpertsConfig, LatentConfig};

/// A model family. Families differ in attention, in the feed-forward layer, and in their biases and norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Family {
    /// Llama: no biases, unless the config sets them.
    Llama,
    /// Mistral: like Llama, with a sliding window.
    Mistral,
    /// Qwen2: with biases on the q, k and v projections.
    Qwen2,
    /// Qwen3: with a norm over each head of q and k.
    Qwen3,
    /// Gemma 3, without images: most layers have a sliding window and a rotary embedding of their own. Has a norm
    /// over each head of q and k, norms before and after attention and the feed-forward layer, GELU gates,
    /// and scaled embeddings.
    Gemma3,
    /// DeepSeek-V3: with latent attention and routed experts. The layers that predict several tokens at once
    /// are ignored.
    DeepSeekV3,
}

/// The settings that may differ from layer to layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerConfig {
    /// The rotary embedding.
    pub rope: RopeConfig,
    /// The sliding window `n`: a token sees itself and the `n − 1` positions before it.
    pub window: Option<usize>,
}

/// The model properties that the forward pass needs.
#[allow(clippy::struct_excessive_bools, reason = "they are independent switches of the format")]
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The family.
    pub family: Family,
    /// The vocabulary size: the number of embeddings.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the feed-forward layer.
    pub intermediate_size: usize,
    /// The decoder layers.
    pub layers: Vec<LayerConfig>,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key/value heads. With latent attention, this is the number of query heads, because the
    /// keys and values of all heads are expanded from one latent.
    pub kv_heads: usize,
    /// The number of elements in one head's query.
    pub head_dim: usize,
    /// Latent attention, if the model has it instead of grouped-query attention (GQA).
    pub latent: Option<LatentConfig>,
    /// Routed experts, if the model has them instead of a dense feed-forward layer.
    pub experts: Option<ExpertsConfig>,
    /// The factor applied to `q·k` before the softmax.
    pub softmax_scale: f32,
    /// The epsilon that each norm adds to the mean square.
    pub rms_norm_eps: f64,
    /// The maximum number of positions per request: the model's own limit, or the larger one that its RoPE
    /// scaling allows.
    pub max_positions: usize,
    /// The factor for embeddings, if they are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_scale: Option<f32>,
    /// True if the files store each norm factor minus 1. GGUF files store the factors themselves.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shifted_norms: bool,
    /// True if the output head shares the embedding matrix.
    pub tied_head: bool,
    /// True if the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// True if the output projection has a bias.
    pub output_bias: bool,
    /// True if the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// The tokens that end an answer. If there are none, an answer ends only when it reaches a limit.
    pub eos: Vec<u32>,
}

/// The fields to read from the file. All other fields are ignored.
#[allow(clippy::struct_excessive_bools, reason = "they are independent switches of the format")]
#[derive(Deserialize)]
struct Raw {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
    hidden_activation: Option<String>,
    #[serde(default)]
    eos_token_id: Value,
}

/// The maximum width, far above any real model's. A config with a larger width must be broken, and tables of
/// that size would exhaust memory.
const MAX_WIDTH: usize = 1 << 14;
/// The maximum number of positions, far above any real model's. A config with more positions must be broken.
const MAX_POSITIONS: usize = 1 << 30;
/// The maximum number of layers, far above any real model's. A config with more layers must be broken.
const MAX_LAYERS: usize = 1 << 14;

impl ModelConfig {
    /// Creates the config of a Llama with `layers` layers for benchmarks with [random
    /// weights](crate::Weights::random). It has heads of 64 elements, a vocabulary of 4096 tokens, and 8192
    /// positions. If the number of query heads is a multiple of four, four of them share a key/value head;
    /// otherwise, each query head has its own.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if `layers` is 0 or too large, or if `hidden_size` is 0, too large or not a
    /// multiple of 64.
    pub fn benchmark(layers: usize, hidden_size: usize) -> Result<Self> {
        const HEAD_DIM: usize = 64;
        if layers == 0 || layers > MAX_LAYERS {
            return Err(Error::Config(format!(
                "the number of layers must be 1 to {MAX_LAYERS}, not {layers}"
            )));
        }
        if hidden_size == 0 || hidden_size > MAX_WIDTH || !hidden_size.is_multiple_of(HEAD_DIM) {
            return Err(Error::Config(format!(
                "the width {hidden_size} must be a multiple of {HEAD_DIM}, at most {MAX_WIDTH}"
            )));
        }
        let heads = hidden_size / HEAD_DIM;
        let layer = LayerConfig { rope: RopeConfig::new(HEAD_DIM, 500_000.0), window: None };
        Ok(Self {
            family: Family::Llama,
            vocab_size: 4096,
            hidden_size,
            intermediate_size: hidden_size * 11 / 4,
            layers: vec![layer; layers],
            heads,
            kv_heads: if heads.is_multiple_of(4) { heads / 4 } else { heads },
            head_dim: HEAD_DIM,
            latent: None,
            experts: None,
            softmax_scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            rms_norm_eps: 1e-5,
            max_positions: 8192,
            embedding_scale: None,
            shifted_norms: false,
            tied_head: true,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            eos: Vec::new(),
        })
    }

    /// Returns the extents of a cache for a model with this config.
    ///
    /// With latent attention, a token has one row in each plane: the rotated part in K and the latent in V.
    pub fn kv_extents(&self, format: impl Into<KvFormat>) -> KvExtents {
        let (heads, k_dim, v_dim) = match self.latent {
            Some(latent) => (1, latent.qk_rope_head_dim, latent.kv_lora_rank),
            None => (self.kv_heads, self.head_dim, self.head_dim),
        };
        KvExtents {
            num_layers: self.num_layers(),
            k_heads: heads,
            v_heads: heads,
            k_dim,
            v_dim,
            max_positions: self.max_positions,
            format: format.into(),
        }
    }

    /// Returns the total feed-forward width that a token uses in a layer: the dense width, or the sum of the
    /// widths of the token's experts.
    pub(crate) fn active_width(&self, layer: usize) -> usize {
        match self.experts.filter(|experts| layer >= experts.dense_layers) {
            Some(experts) => (experts.per_token + experts.shared) * experts.intermediate_size,
            None => self.intermediate_size,
        }
    }

    /// Parses a config.json.
    ///
    /// # Errors
    /// Returns [`Error::Config`], with the field and its value, if the config is invalid or not supported.
    pub fn from_json(text: &str) -> Result<Self> {
        let mut json: Value = serde_json::from_str(text).map_err(|e| Error::Config(e.to_string()))?;
        refuse_other_positions(&json)?;
        quantised::refuse(&json)?;
        let family = family(&json)?;
        let gemma = family == Family::Gemma3;
        if gemma {
            json = gemma3::complete(&json)?;
        }
        let raw = Raw::deserialize(&json).map_err(|e| Error::Config(e.to_string()))?;
        let kv_heads = raw.check(family)?;
        let (latent, experts) = match family {
            Family::DeepSeekV3 => (Some(LatentConfig::read(&json)?), Some(ExpertsConfig::read(&json)?)),
            _ => (None, None),
        };
        let head_dim = match latent {
            Some(latent) => latent.qk_head_dim(),
            None => raw.head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads),
        };
        if head_dim == 0 || head_dim > MAX_WIDTH {
            let derived = match raw.head_dim {
                None if latent.is_none() => " (hidden_size over num_attention_heads)",
                _ => "",
            };
            return bad(format!("head_dim {head_dim}{derived} is not in 1..={MAX_WIDTH}"));
        }
        // A projection has at most as many elements per head as a query and a value together.
        if raw.num_attention_heads.checked_mul(2 * MAX_WIDTH).is_none() {
            return bad(format!("num_attention_heads {} overflow", raw.num_attention_heads));
        }
        rope::check_shapes(&json)?;
        // DeepSeek stores rotated elements as interleaved pairs, unless the config specifies otherwise.
        let interleaved = json.get("rope_interleave").and_then(Value::as_bool).unwrap_or(true);
        let (rotated, pairing) = match latent {
            Some(latent) if interleaved => (latent.qk_rope_head_dim, Pairing::Interleaved),
            Some(latent) => (latent.qk_rope_head_dim, Pairing::HalfSplit),
            None => (head_dim, Pairing::HalfSplit),
        };
        let layers = window::windows(&json, family, raw.num_hidden_layers)?
            .into_iter()
            .map(|(kind, window)| {
                Ok(LayerConfig { rope: rope::rope(&json, kind, rotated, pairing)?, window })
            })
            .collect::<Result<Vec<_>>>()?;
        let limit = |layer: &LayerConfig| layer.rope.max_positions(raw.max_position_embeddings);
        let scalar = if gemma { gemma3::query_scalar(&json)? } else { head_dim as f64 };
        let softmax_factor = latent.map_or(1.0, |_| rope::softmax_factor(&json));
        let biased = raw.attention_bias && family != Family::Mistral;
        Ok(Self {
            family,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            max_positions: layers.iter().map(limit).min().unwrap_or(raw.max_position_embeddings),
            layers,
            heads: raw.num_attention_heads,
            kv_heads,
            head_dim,
            latent,
            experts,
            softmax_scale: (softmax_factor / scalar.sqrt()) as f32,
            rms_norm_eps: raw.rms_norm_eps,
            embedding_scale: gemma.then(|| gemma3::embedding_scale(&json, raw.hidden_size)),
            shifted_norms: gemma,
            tied_head: raw.tie_word_embeddings,
            qkv_bias: biased || family == Family::Qwen2,
            output_bias: biased && family != Family::Qwen2,
            mlp_bias: raw.mlp_bias && !matches!(family, Family::Mistral | Family::DeepSeekV3),
            eos: token_ids(&raw.eos_token_id)?,
        })
    }

    /// Checks numbers that a model could be built with but that no model has: they would give answers without
    /// meaning. Building a [`Model`](crate::Model) calls this method.
    ///
    /// # Errors
    /// Returns [`Error::Config`], with the field and its range.
    pub fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.rms_norm_eps) {
            return bad(format!("rms_norm_eps is {}, not from 0 to 1", self.rms_norm_eps));
        }
        if self.max_positions > MAX_POSITIONS {
            return bad(format!("max_position_embeddings {} is above {MAX_POSITIONS}", self.max_positions));
        }
        let scales =
            [("softmax scale", self.softmax_scale), ("embedding scale", self.embedding_scale.unwrap_or(1.0))];
        if let Some((what, scale)) =
            scales.into_iter().find(|(_, scale)| !(scale.is_finite() && *scale > 0.0))
        {
            return bad(format!("the {what} that follows from the fields is {scale}, not a number above 0"));
        }
        if let Some(token) = self.eos.iter().find(|&&token| token as usize >= self.vocab_size) {
            let known = self.vocab_size;
            return bad(format!("eos_token_id {token} is outside the vocabulary of {known} tokens"));
        }
        Ok(())
    }

    /// Returns the width of the widest sliding window, or `None` if at least one layer has no window. No
    /// layer reads keys older than this window.
    pub fn widest_window(&self) -> Option<usize> {
        self.layers.iter().map(|layer| layer.window).try_fold(0, |most, window| Some(most.max(window?)))
    }

    /// Returns the number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Adds the end tokens from a `generation_config.json`.
    pub fn add_generation_config(&mut self, text: &str) -> Result<()> {
        let value: Value = serde_json::from_str(text).map_err(|e| Error::Config(e.to_string()))?;
        for id in token_ids(value.get("eos_token_id").unwrap_or(&Value::Null))? {
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        Ok(())
    }
}

/// Parses `eos_token_id`, which may be absent, null, a number or a list.
fn token_ids(value: &Value) -> Result<Vec<u32>> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or(Error::Config(format!("eos_token_id {v} is not a token ID")))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => list.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}

impl Raw {
    /// Checks the activation function and the sizes. Returns the number of key/value heads.
    fn check(&self, family: Family) -> Result<usize> {
        let (field, given, known) = match family {
            Family::Gemma3 => ("hidden_activation", &self.hidden_activation, &["gelu_pytorch_tanh"][..]),
            _ => ("hidden_act", &self.hidden_act, &["silu", "swish"][..]),
        };
        if let Some(act) = given.as_deref().filter(|act| !known.contains(act)) {
            return bad(format!("{field} {act:?} is not supported (only {} is)", known[0]));
        }
        let (heads, kv_heads) =
            (self.num_attention_heads, self.num_key_value_heads.unwrap_or(self.num_attention_heads));
        for (what, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            if value == 0 {
                return bad(format!("{what} is 0"));
            }
        }
        if self.num_hidden_layers > MAX_LAYERS {
            return bad(format!("num_hidden_layers {} is above {MAX_LAYERS}", self.num_hidden_layers));
        }
        if !heads.is_multiple_of(kv_heads) {
            return bad(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            ));
        }
        Ok(kv_heads)
    }
}

fn family(json: &Value) -> Result<Family> {
    let model_type = json.get("model_type").and_then(Value::as_str).unwrap_or_default();
    Ok(match model_type {
        "llama" => Family::Llama,
        "mistral" => Family::Mistral,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        "deepseek_v3" => Family::DeepSeekV3,
        "gemma3_text" => Family::Gemma3,
        "gemma3" => {
            return bad(
                "model_type \"gemma3\": models with images are not supported (gemma3_text is)".to_owned()
            );
        }
        other => {
            return bad(format!(
                "model_type {other:?} is not supported (supported: llama, mistral, qwen2, qwen3, gemma3_text and \
                 deepseek_v3)"
            ));
        }
    })
}

/// Rejects models whose position encoding is not rotary: their keys cannot be moved to other positions, and
/// this crate does not implement their attention.
fn refuse_other_positions(json: &Value) -> Result<()> {
    let text = |name: &str| json.get(name).and_then(Value::as_str).unwrap_or_default();
    let model_type = text("model_type");
    for name in ["alibi", "use_alibi"] {
        if json.get(name).and_then(Value::as_bool) == Some(true) {
            return bad(format!("{name} true: ALiBi is not supported (only RoPE is)"));
        }
    }
    match (model_type, text("position_embedding_type")) {
        (_, "alibi") => {
            bad("position_embedding_type \"alibi\": ALiBi is not supported (only RoPE is)".to_owned())
        }
        (_, kind @ ("absolute" | "learned" | "learned_absolute")) => bad(format!(
            "position_embedding_type {kind:?}: learned positions are not supported (only RoPE is)"
        )),
        ("bloom" | "mpt", _) => {
            bad(format!("model_type {model_type:?}: ALiBi is not supported (only RoPE is)"))
        }
        ("gpt2" | "gpt_bigcode" | "opt", _) => {
            bad(format!("model_type {model_type:?}: learned positions are not supported (only RoPE is)"))
        }
        _ => Ok(()),
    }
}

fn bad<T>(message: String) -> Result<T> {
    Err(Error::Config(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"{"model_type":"llama","vocab_size":10,"hidden_size":8,"intermediate_size":16,
        "num_hidden_layers":1,"num_attention_heads":2,"rms_norm_eps":1e-5,"max_position_embeddings":64"#;

    fn config(more: &str) -> Result<ModelConfig> {
        ModelConfig::from_json(&format!("{BASE}{more}}}"))
    }

    #[test]
    fn both_generations_of_rope_fields_mean_the_same() {
        let scaling = r#""factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":32"#;
        let four =
            config(&format!(r#","rope_theta":500000.0,"rope_scaling":{{"rope_type":"llama3",{scaling}}}"#));
        let five = config(&format!(
            r#","rope_parameters":{{"rope_type":"llama3","rope_theta":500000.0,{scaling}}}"#
        ));
        assert_eq!(four.unwrap(), five.unwrap());
        let layers = config("").unwrap().layers;
        assert_eq!(layers, [LayerConfig { rope: RopeConfig::new(4, 10_000.0), window: None }]);
    }

    #[test]
    fn end_tokens_may_be_absent_null_a_number_or_a_list() {
        assert_eq!(config("").unwrap().eos, [] as [u32; 0]);
        assert_eq!(config(r#","eos_token_id":null"#).unwrap().eos, [] as [u32; 0]);
        assert_eq!(config(r#","eos_token_id":7"#).unwrap().eos, [7]);
        let mut both = config(r#","eos_token_id":[7,9]"#).unwrap();
        both.add_generation_config(r#"{"eos_token_id":[9,3]}"#).unwrap();
        assert_eq!(both.eos, [7, 9, 3]);
    }

    #[test]
    fn numbers_that_no_model_has_are_refused() {
        let checked = |text: &str| ModelConfig::from_json(text).and_then(|config| config.check());
        let with = |field: &str, value: &str| {
            let end = BASE.find(field).map(|at| at + field.len() + 2).unwrap();
            let rest = BASE[end..].find(',').map_or("", |comma| &BASE[end + comma..]);
            format!("{}{value}{rest}}}", &BASE[..end])
        };
        let scaling = |fields: &str| format!("{BASE},\"rope_scaling\":{{{fields}}}}}");
        for (text, name) in [
            (with("rms_norm_eps", "-1.0"), "rms_norm_eps is -1"),
            (with("rms_norm_eps", "1e308"), "rms_norm_eps is 1"),
            (with("max_position_embeddings", "9223372036854775808"), "max_position_embeddings"),
            (with("max_position_embeddings", "1099511627776"), "above 1073741824"),
            (format!("{BASE},\"eos_token_id\":10}}"), "eos_token_id 10"),
            (format!("{BASE},\"eos_token_id\":[3,4000000000]}}"), "eos_token_id 4000000000"),
            (format!("{BASE},\"rope_theta\":1e300}}"), "rope_theta"),
            (scaling("\"factor\":2.0"), "rope_type is missing"),
            (scaling("\"factor\":8,\"original_max_position_embeddings\":32"), "rope_type is missing"),
            (scaling("\"type\":\"yarn\",\"factor\":2.0,\"attention_factor\":1e300"), "attention_factor"),
            (scaling("\"type\":\"linear\",\"factor\":1e39"), "factor"),
        ] {
            let error = checked(&text).expect_err(&text).to_string();
            assert!(error.contains(name), "{text}: {error}");
        }
        checked(&format!("{BASE},\"eos_token_id\":9}}")).unwrap();
        checked(&scaling("\"type\":\"linear\",\"factor\":2.0")).unwrap();
        checked(&scaling("\"factor\":null")).unwrap();
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (text, name) in [
            (r#"{"model_type":"mamba"}"#.to_owned(), "mamba"),
            (format!(r#"{BASE},"hidden_act":"gelu"}}"#), "gelu"),
            (r#"{"model_type":"bloom"}"#.to_owned(), "ALiBi"),
            (format!(r#"{BASE},"alibi":true}}"#), "alibi true: ALiBi"),
            (format!(r#"{BASE},"position_embedding_type":"alibi"}}"#), "ALiBi"),
            (format!(r#"{BASE},"position_embedding_type":"absolute"}}"#), "absolute"),
            (r#"{"model_type":"gpt2"}"#.to_owned(), "learned positions"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"mrope"}}}}"#), "M-RoPE"),
            (
                format!(r#"{BASE},"rope_parameters":{{"rope_type":"default","mrope_section":[1,1]}}}}"#),
                "mrope_section [1,1]: M-RoPE",
            ),
            (format!(r#"{BASE},"rope_scaling":{{"type":"xpos","factor":2.0}}}}"#), "xpos"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"dynamic"}}}}"#), "factor"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"dynamic","factor":0.5}}}}"#), "factor 0.5"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"longrope","short_factor":[1,1]}}}}"#), "long_factor"),
            (
                format!(
                    r#"{BASE},"rope_scaling":{{"type":"longrope","short_factor":[1],"long_factor":[1,1]}}}}"#
                ),
                "short_factor has 1",
            ),
            (format!(r#"{BASE},"num_key_value_heads":0}}"#), "num_key_value_heads"),
            (
                format!(r#"{BASE},"head_dim":4,"num_attention_heads":1152921504606846976}}"#),
                "num_attention_heads 1152921504606846976",
            ),
            (format!(r#"{BASE},"head_dim":1099511627776}}"#), "head_dim 1099511627776"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"yarn","factor":2.0,"beta_fast":0}}}}"#), "beta_fast"),
            (
                format!(r#"{BASE},"rope_scaling":{{"type":"yarn","factor":2.0,"attention_factor":-1}}}}"#),
                "attention_factor",
            ),
            (format!(r#"{BASE},"partial_rotary_factor":2.0}}"#), "partial_rotary_factor"),
            (format!(r#"{BASE},"num_hidden_layers":99999}}"#), "num_hidden_layers"),
            ("{".to_owned(), "EOF"),
            (r#"{"model_type":"llama"}"#.to_owned(), "vocab_size"),
        ] {
            let error = ModelConfig::from_json(&text).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
