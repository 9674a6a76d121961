//! Converts a GGUF file's fields to the config that a Hugging Face model would have.

use serde_json::{Value, json};

use super::ends;
use super::failure::{GgufFailure, wrong};
use super::fields::{Header, required};
use crate::config::ModelConfig;
use crate::error::Error;

/// Required integer fields: each one's GGUF name, without the architecture's prefix, and its config.json
/// name.
const NEEDED: [(&str, &str); 5] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
];

/// Optional integer fields, which have defaults: each one's GGUF name, without the architecture's prefix,
/// and its config.json name.
const OPTIONAL: [(&str, &str); 2] =
    [("attention.head_count_kv", "num_key_value_heads"), ("attention.key_length", "head_dim")];

/// Optional integer fields of Gemma 3. Other families do not have them, so that a file that does gets a note.
const OF_GEMMA3: [(&str, &str); 2] = [
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
];

/// Optional numeric fields of Gemma 3: each one's GGUF name, without the architecture's prefix, and its config.json name.
const REALS: [(&str, &str); 3] = [
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];

/// GGUF fields with numbers for the rotary embedding, each with the name that the rotary embedding's errors
/// use for it.
const ROPE: [(&str, &str); 3] = [
    ("rope.freq_base", "theta"),
    ("rope.scaling.factor", "factor"),
    ("rope.scaling.original_context_length", "original_max_position"),
];

/// The name of Gemma 3's architecture.
const GEMMA3: &str = "gemma3";

/// Converts the fields of a file to a config.
pub(super) fn config(header: &Header) -> Result<ModelConfig, GgufFailure> {
    let architecture = required("general.architecture", header.text("general.architecture")?)?;
    let name = |field: &str| format!("{architecture}.{field}");
    let whole = |field: &str| header.whole(&name(field));
    let needed = |field: &str| required(&name(field), whole(field)?);
    if !["llama", "qwen2", "qwen3", GEMMA3].contains(&architecture) {
        return wrong(format!(
            "architecture {architecture:?} is not supported (supported: llama, which mistral models are stored as, qwen2, \
             qwen3 and gemma3)"
        ));
    }
    if whole("expert_count")?.is_some_and(|experts| experts > 0) {
        return wrong(format!(
            "{architecture:?} with {} experts is not supported",
            whole("expert_count")?.unwrap_or(0)
        ));
    }
    // A model without heads is rejected later, together with other wrong sizes.
    let derived = needed("embedding_length")?.checked_div(needed("attention.head_count")?);
    if let (Some(rotated), Some(head_dim)) =
        (whole("rope.dimension_count")?, whole("attention.key_length")?.or(derived))
        && rotated != head_dim
    {
        return wrong(format!(
            "{rotated} of {head_dim} elements of a head are rotated ({architecture}.rope.dimension_count), but all must \
             be"
        ));
    }
    let vocabulary = header.tensors.iter().find(|place| place.name == "token_embd.weight");
    let Some(vocabulary) = vocabulary.map(|place| place.shape[0]) else {
        return wrong("tensor \"token_embd.weight\" is missing");
    };
    let eps = name("attention.layer_norm_rms_epsilon");
    let mut config = json!({
        "model_type": if architecture == GEMMA3 { "gemma3_text" } else { architecture },
        "vocab_size": vocabulary,
        "rms_norm_eps": required(&eps, header.real(&eps)?)?,
        "tie_word_embeddings": !header.has("output.weight"),
        "attention_bias": architecture == "llama" && header.has("blk.0.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
        "rope_theta": header.real(&name("rope.freq_base"))?.unwrap_or(10_000.0),
        "rope_scaling": scaling(header, architecture)?,
        "eos_token_id": ends::ends(header)?,
    });
    for (field, own) in NEEDED {
        config[own] = json!(needed(field)?);
    }
    for (field, own) in OPTIONAL {
        config[own] = json!(whole(field)?);
    }
    if architecture == GEMMA3 {
        for (field, own) in OF_GEMMA3 {
            config[own] = json!(whole(field)?);
        }
        for (field, own) in REALS {
            config[own] = json!(header.real(&name(field))?);
        }
        needed("attention.sliding_window")?;
        // No field specifies the scale of queries. As in llama.cpp, the number of layers identifies the only
        // model in which it does not depend on the width of a head.
        config["query_pre_attn_scalar"] = match needed("block_count")? {
            62 => json!(derived),
            _ => config["head_dim"].clone(),
        };
    }
    let config = ModelConfig::from_json(&config.to_string()).map_err(|error| match error {
        Error::Config(reason) => GgufFailure::Wrong(in_fields(&reason, architecture)),
        other => other.into(),
    })?;
    Ok(ModelConfig { shifted_norms: false, ..config })
}

/// Returns the text of a config error, with the GGUF file's field names in place of config.json's.
fn in_fields(reason: &str, architecture: &str) -> String {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    let renamed = |part: &str| {
        let word = part.trim_end_matches(|c| !in_word(c));
        let mut known = NEEDED.iter().chain(&OPTIONAL).chain(&OF_GEMMA3).chain(&REALS).chain(&ROPE);
        let field = known.find(|(_, own)| *own == word).map(|(field, _)| format!("{architecture}.{field}"));
        field.map_or_else(|| part.to_owned(), |field| field + &part[word.len()..])
    };
    reason.split_inclusive(|c| !in_word(c)).map(renamed).collect()
}

/// Returns the scaling of the rotary embedding, or null if there is none. As in llama.cpp, a factor without a
/// type is linear, and older files have it under another name.
fn scaling(header: &Header, architecture: &str) -> Result<Value, GgufFailure> {
    let name = |field: &str| format!("{architecture}.rope.scaling.{field}");
    let real = |field: &str| header.real(&name(field));
    let given = header.text(&name("type"))?;
    let old = header.real(&format!("{architecture}.rope.scale_linear"))?;
    let factor = real("factor")?.or(old).filter(|factor| *factor != 0.0);
    let original = header.whole(&name("original_context_length"))?;
    // The fields of YaRN that must have their defaults: each one's name, and its values that mean the same.
    let only = |fields: &[&str], allowed: &[f64]| -> Result<(), GgufFailure> {
        for field in fields {
            if let Some(value) = real(field)?.filter(|value| !allowed.contains(value)) {
                return wrong(format!(
                    "field {:?} is {value} (supported with this scaling: {})",
                    name(field),
                    allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
                ));
            }
        }
        Ok(())
    };
    let kind = match given {
        None => "linear",
        Some(kind @ ("none" | "linear" | "yarn")) => kind,
        Some(other) => {
            return wrong(format!(
                "field {:?} is {other:?} (supported: none, linear and yarn)",
                name("type")
            ));
        }
    };
    if kind == "yarn" {
        let factor = required(&name("factor"), factor)?;
        only(&["yarn_ext_factor"], &[1.0, -1.0])?;
        only(&["yarn_log_multiplier"], &[0.0])?;
        let scale = real("attn_factor")?.unwrap_or(1.0);
        // llama.cpp overwrites the field yarn_attn_factor, so the field is named among those that are not used.
        let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
        let attention = (scale != 1.0).then_some(scale * usual);
        return Ok(json!({
            "rope_type": kind, "factor": factor, "original_max_position_embeddings": original,
            "attention_factor": attention, "beta_fast": real("yarn_beta_fast")?, "beta_slow": real("yarn_beta_slow")?,
        }));
    }
    only(&["attn_factor", "yarn_attn_factor"], &[1.0])?;
    only(&["yarn_ext_factor"], &[0.0, -1.0])?;
    // They have no effect without YaRN.
    for field in ["yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"] {
        real(field)?;
    }
    match (kind, factor) {
        ("none", _) | (_, None) if given != Some("linear") => Ok(Value::Null),
        (_, factor) => Ok(json!({ "rope_type": kind, "factor": required(&name("factor"), factor)? })),
    }
}
