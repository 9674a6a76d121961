//! The fields of a GGUF file as the config that a Hugging Face model would have.

use serde_json::{Value, json};

use super::fields::{Header, required};
use super::{Failure, wrong};
use crate::config::ModelConfig;

/// Returns the config of a file.
pub(super) fn config(header: &Header) -> Result<ModelConfig, Failure> {
    let architecture = required("general.architecture", header.text("general.architecture")?)?;
    let name = |field: &str| format!("{architecture}.{field}");
    let whole = |field: &str| header.whole(&name(field));
    let needed = |field: &str| required(&name(field), whole(field)?);
    if !["llama", "qwen2", "qwen3"].contains(&architecture) {
        return wrong(format!(
            "architecture {architecture:?} is not supported (llama, which mistral is stored as, qwen2 and qwen3 are)"
        ));
    }
    if whole("expert_count")?.is_some_and(|experts| experts > 0) {
        return wrong(format!(
            "{} experts of {architecture:?} are not supported",
            whole("expert_count")?.unwrap_or(0)
        ));
    }
    let heads = needed("attention.head_count")?;
    let head_dim = whole("attention.key_length")?;
    if let (Some(rotated), Some(width)) = (whole("rope.dimension_count")?, needed("embedding_length").ok()) {
        let head_dim = head_dim.unwrap_or(width / heads.max(1));
        if rotated != head_dim {
            return wrong(format!(
                "{rotated} of {head_dim} elements of a head are rotated; all are supported"
            ));
        }
    }
    let vocabulary = header.tensors.iter().find(|place| place.name == "token_embd.weight");
    let Some(vocabulary) = vocabulary.map(|place| place.shape[0]) else {
        return wrong("tensor \"token_embd.weight\" is missing");
    };
    let mut ends = Vec::new();
    for field in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        ends.extend(header.whole(field)?.filter(|end| !ends.contains(end)));
    }
    let eps = name("attention.layer_norm_rms_epsilon");
    let config = json!({
        "model_type": architecture,
        "vocab_size": vocabulary,
        "hidden_size": needed("embedding_length")?,
        "intermediate_size": needed("feed_forward_length")?,
        "num_hidden_layers": needed("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "rms_norm_eps": required(&eps, header.real(&eps)?)?,
        "max_position_embeddings": needed("context_length")?,
        "tie_word_embeddings": !header.has("output.weight"),
        "attention_bias": architecture == "llama" && header.has("blk.0.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
        "rope_theta": header.real(&name("rope.freq_base"))?.unwrap_or(10_000.0),
        "rope_scaling": scaling(header, architecture)?,
        "eos_token_id": ends,
    });
    Ok(ModelConfig::from_json(&config.to_string())?)
}

/// Returns the scaling of the rotary embedding, null if there is none.
fn scaling(header: &Header, architecture: &str) -> Result<Value, Failure> {
    let name = |field: &str| format!("{architecture}.rope.scaling.{field}");
    let kind = match header.text(&name("type"))? {
        None | Some("none") => return Ok(Value::Null),
        Some(kind @ ("linear" | "yarn")) => kind,
        Some(other) => {
            return wrong(format!("field {:?} is {other:?} (none, linear and yarn are read)", name("type")));
        }
    };
    let factor = required(&name("factor"), header.real(&name("factor"))?)?;
    let original = header.whole(&name("original_context_length"))?;
    Ok(match original {
        Some(original) if kind == "yarn" => {
            json!({ "rope_type": kind, "factor": factor, "original_max_position_embeddings": original })
        }
        _ => json!({ "rope_type": kind, "factor": factor }),
    })
}
