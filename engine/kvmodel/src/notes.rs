//! What a Hugging Face model's files say, and the model does not do or does otherwise.

use serde_json::Value;

use crate::config::ModelConfig;
use crate::weights::Weights;

/// Fields of config.json that change other models' arithmetic, each with the value that has no effect. The
/// families that this crate runs do not read them.
const UNUSED: [(&str, f64); 24] = [
    ("attention_multiplier", f64::NAN),
    ("attn_logit_softcapping", f64::NAN),
    ("attn_temperature_tuning", 0.0),
    ("attention_chunk_size", f64::NAN),
    ("clip_qkv", f64::NAN),
    ("dual_chunk_attention_config", f64::NAN),
    ("embedding_multiplier", 1.0),
    ("final_logit_softcapping", f64::NAN),
    ("layer_norm_eps", f64::NAN),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("no_rope_layer_interval", f64::NAN),
    ("no_rope_layers", f64::NAN),
    ("num_experts", 0.0),
    ("num_local_experts", 0.0),
    ("qk_layernorm", 0.0),
    ("qk_norm", 0.0),
    ("residual_multiplier", 1.0),
    ("residual_scale", 1.0),
    ("rope_pct", 1.0),
    ("rotary_pct", 1.0),
    ("scale_emb", 1.0),
    ("use_qk_norm", 0.0),
    ("use_parallel_residual", 0.0),
];

/// Returns a sentence that names the fields of a config.json which are not used and could matter.
pub(crate) fn unused(config: &str) -> Vec<String> {
    let Ok(config) = serde_json::from_str::<Value>(config) else { return Vec::new() };
    let set = |(name, neutral): &&(&str, f64)| match config.get(*name) {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(value) => value.as_f64().is_none_or(|value| value != *neutral),
    };
    let names: Vec<&str> = UNUSED.iter().filter(set).map(|(name, _)| *name).collect();
    if names.is_empty() {
        return Vec::new();
    }
    vec![format!("these fields of config.json are not used: {}", names.join(", "))]
}

/// Tensors that follow from the config, by the ends of their names.
const DERIVED: [&str; 5] =
    ["rotary_emb.inv_freq", "attn.masked_bias", "attn.bias_mask", "rope_freqs.weight", "rope_factors.weight"];

/// The number of tensors that a note names.
const NAMED: usize = 4;

/// Returns a sentence that names tensors in the files that the model has not used, or `None` if there are none
/// that could matter.
pub(crate) fn tensors(unused: &[String], config: &ModelConfig) -> Option<String> {
    // A tied head that equals the embeddings, or is replaced by them, has its own note.
    let is_head = |name: &str| config.tied_head && name == "lm_head.weight";
    let matters = |name: &&String| !DERIVED.iter().any(|end| name.ends_with(end)) && !is_head(name);
    let names: Vec<&str> = unused.iter().filter(matters).map(String::as_str).collect();
    let (first, rest) = names.split_at(names.len().min(NAMED));
    let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
    (!first.is_empty())
        .then(|| format!("these tensors of the files are not used: {}{more}", first.join(", ")))
}

/// If the config ties the output head to the embeddings, but the files have a head with other elements, makes
/// the model use that head. Returns a sentence that says so.
pub(crate) fn untie(config: &mut ModelConfig, weights: &Weights) -> Option<String> {
    let (Some(head), Some(table)) =
        (weights.peek("lm_head.weight"), weights.peek("model.embed_tokens.weight"))
    else {
        return None;
    };
    if !config.tied_head || head.has_elements_of(table) {
        return None;
    }
    config.tied_head = false;
    Some(
        "config.json ties the output head to the embeddings (tie_word_embeddings), but the files have another \
         lm_head.weight, which is used"
            .to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_could_matter_are_named() {
        let names = |config: &str| unused(config).join("");
        for neutral in
            ["{}", r#"{"logit_scale": 1.0, "num_experts": 0, "clip_qkv": null, "use_qk_norm": false}"#]
        {
            assert_eq!(names(neutral), "");
        }
        for (field, value) in [
            ("attention_multiplier", "0.1"),
            ("no_rope_layers", "[1]"),
            ("use_qk_norm", "true"),
            ("residual_multiplier", "0.2"),
        ] {
            assert!(names(&format!(r#"{{"{field}": {value}}}"#)).contains(field));
        }
    }
}
