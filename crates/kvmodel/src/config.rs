//! config.json of Hugging Face transformers, versions 4 and 5.

use kvcore::{Pairing, RopeConfig, RopeScaling};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};

/// Model families that differ in where biases and norms stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Family {
    /// Llama: no biases unless the config says so.
    Llama,
    /// Qwen2: biases on the q, k and v projections.
    Qwen2,
    /// Qwen3: a norm over each head of q and k.
    Qwen3,
}

/// What the forward pass needs to know of a model.
#[allow(clippy::struct_excessive_bools, reason = "they are independent switches of the format")]
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// The family.
    pub family: Family,
    /// Embeddings.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Rotary embedding of every layer.
    pub rope: RopeConfig,
    /// Whether the head is the embedding.
    pub tied_head: bool,
    /// Whether q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Tokens that end an answer; none means that only limits do.
    pub eos: Vec<u32>,
}

/// The fields read from the file; everything else in it is ignored.
#[allow(clippy::struct_excessive_bools, reason = "they are independent switches of the format")]
#[derive(Deserialize)]
struct Raw {
    model_type: String,
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
    #[serde(default)]
    use_sliding_window: bool,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    eos_token_id: Value,
}

/// Far above any model; a config beyond it is broken, and its tables would exhaust memory.
const MAX_HEAD_DIM: usize = 1 << 14;

impl ModelConfig {
    /// Reads a config.json.
    ///
    /// # Errors
    /// [`Error::Config`] that names the field and its value.
    pub fn from_json(text: &str) -> Result<Self> {
        let bad = |message: String| Err(Error::Config(message));
        let model_type = serde_json::from_str::<Value>(text)
            .map_err(|e| Error::Config(e.to_string()))?
            .get("model_type")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let family = match model_type.as_str() {
            "llama" => Family::Llama,
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            other => {
                return bad(format!("model_type {other:?} is not supported (llama, qwen2 and qwen3 are)"));
            }
        };
        let raw: Raw = serde_json::from_str(text).map_err(|e| Error::Config(e.to_string()))?;
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
            return bad(format!("hidden_act {act:?} is not supported (silu is)"));
        }
        if raw.use_sliding_window {
            return bad(format!("use_sliding_window is not supported for {}", raw.model_type));
        }
        let kv_heads = raw.num_key_value_heads.unwrap_or(raw.num_attention_heads);
        for (what, value) in [
            ("vocab_size", raw.vocab_size),
            ("hidden_size", raw.hidden_size),
            ("intermediate_size", raw.intermediate_size),
            ("num_hidden_layers", raw.num_hidden_layers),
            ("num_attention_heads", raw.num_attention_heads),
            ("num_key_value_heads", kv_heads),
            ("max_position_embeddings", raw.max_position_embeddings),
        ] {
            if value == 0 {
                return bad(format!("{what} is 0"));
            }
        }
        if !raw.num_attention_heads.is_multiple_of(kv_heads) {
            return bad(format!(
                "{} query heads are not a multiple of {kv_heads} key/value heads",
                raw.num_attention_heads
            ));
        }
        let head_dim = raw.head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads);
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return bad(format!("head_dim {head_dim} is not in 1..={MAX_HEAD_DIM}"));
        }
        if raw.num_attention_heads.checked_mul(head_dim).is_none() {
            return bad(format!("{} heads of {head_dim} overflow", raw.num_attention_heads));
        }
        Ok(Self {
            family,
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            num_layers: raw.num_hidden_layers,
            heads: raw.num_attention_heads,
            kv_heads,
            head_dim,
            rms_norm_eps: raw.rms_norm_eps,
            max_positions: raw.max_position_embeddings,
            rope: rope(&raw, head_dim)?,
            tied_head: raw.tie_word_embeddings,
            qkv_bias: raw.attention_bias || family == Family::Qwen2,
            output_bias: raw.attention_bias && family != Family::Qwen2,
            mlp_bias: raw.mlp_bias,
            eos: token_ids(&raw.eos_token_id)?,
        })
    }

    /// Adds the end tokens of a `generation_config.json`.
    pub fn add_generation_config(&mut self, text: &str) -> Result<()> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| Error::Config(format!("generation: {e}")))?;
        for id in token_ids(value.get("eos_token_id").unwrap_or(&Value::Null))? {
            if !self.eos.contains(&id) {
                self.eos.push(id);
            }
        }
        Ok(())
    }
}

/// `eos_token_id` is absent, null, a number or a list.
fn token_ids(value: &Value) -> Result<Vec<u32>> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or(Error::Config(format!("eos_token_id {v} is no token id")))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => list.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}

/// transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes `rope_parameters` with both.
fn rope(raw: &Raw, head_dim: usize) -> Result<RopeConfig> {
    let none = Value::Null;
    let parameters = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref()).unwrap_or(&none);
    let number = |name: &str| parameters.get(name).and_then(Value::as_f64);
    let need = |name: &str| number(name).ok_or_else(|| Error::Config(format!("rope scaling lacks {name}")));
    let original = |name: &str| -> Result<usize> { Ok(need(name)? as usize) };
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
    let scaling = match kind.and_then(Value::as_str).unwrap_or("default") {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: need("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_max_position: original("original_max_position_embeddings")?,
        },
        "yarn" => {
            let factor = need("factor")?;
            RopeScaling::Yarn {
                factor,
                attention_factor: number("attention_factor").unwrap_or_else(|| yarn_factor(factor, &number)),
                beta_fast: number("beta_fast").unwrap_or(32.0),
                beta_slow: number("beta_slow").unwrap_or(1.0),
                original_max_position: number("original_max_position_embeddings")
                    .map_or(raw.max_position_embeddings, |n| n as usize),
                truncate: parameters.get("truncate").and_then(Value::as_bool).unwrap_or(true),
            }
        }
        other => {
            return Err(Error::Config(format!(
                "rope type {other:?} is not supported (default, linear, llama3 and yarn are)"
            )));
        }
    };
    let theta = number("rope_theta").or(raw.rope_theta).unwrap_or(10_000.0);
    let part = number("partial_rotary_factor").or(raw.partial_rotary_factor).unwrap_or(1.0);
    let rotary_dim = (head_dim as f64 * part) as usize;
    if rotary_dim > head_dim {
        return Err(Error::Config(format!("partial_rotary_factor {part} is above 1")));
    }
    let config = RopeConfig { rotary_dim, theta, pairing: Pairing::HalfSplit, scaling };
    config.frequencies()?;
    Ok(config)
}

/// The attention factor of `YaRN` where the config does not give one (Peng et al., 2023, and the
/// `mscale` of DeepSeek).
fn yarn_factor(factor: f64, number: &dyn Fn(&str) -> Option<f64>) -> f64 {
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    match (number("mscale"), number("mscale_all_dim")) {
        (Some(a), Some(b)) if a != 0.0 && b != 0.0 => scale(a) / scale(b),
        _ => scale(1.0),
    }
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
        assert_eq!(config("").unwrap().rope, RopeConfig::new(4, 10_000.0));
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
    fn what_is_not_supported_is_named() {
        for (text, name) in [
            (r#"{"model_type":"gpt2"}"#.to_owned(), "gpt2"),
            (format!(r#"{BASE},"hidden_act":"gelu"}}"#), "gelu"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"dynamic","factor":2.0}}}}"#), "dynamic"),
            (format!(r#"{BASE},"num_key_value_heads":0}}"#), "num_key_value_heads"),
            (format!(r#"{BASE},"head_dim":1099511627776}}"#), "head_dim 1099511627776"),
            (format!(r#"{BASE},"rope_scaling":{{"type":"yarn","factor":2.0,"beta_fast":0}}}}"#), "beta_fast"),
            (
                format!(r#"{BASE},"rope_scaling":{{"type":"yarn","factor":2.0,"attention_factor":-1}}}}"#),
                "attention_factor",
            ),
            (format!(r#"{BASE},"partial_rotary_factor":2.0}}"#), "partial_rotary_factor"),
            (format!(r#"{BASE},"use_sliding_window":true}}"#), "sliding"),
            ("{".to_owned(), "EOF"),
            (r#"{"model_type":"llama"}"#.to_owned(), "vocab_size"),
        ] {
            let error = ModelConfig::from_json(&text).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
