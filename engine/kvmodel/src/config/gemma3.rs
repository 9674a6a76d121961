//! The parts of a config that are specific to Gemma 3.

use half::{bf16, f16};
use serde_json::{Value, json};

use super::window::{FULL, SLIDING};
use super::{MAX_LAYERS, bad};
use crate::error::{Error, Result};

/// transformers' default number of layers per layer with full attention.
const PATTERN: u64 = 6;
/// transformers' default for a head's number of elements, and for the number whose inverse root scales `q·k`.
const HEAD_DIM: u64 = 256;

/// Returns the config in transformers' newest form: with a type for each layer, a rotary embedding for each
/// layer type, and all defaults.
///
/// # Errors
/// Returns [`Error::Config`], with the field and its value, for a setting that is not supported.
pub(super) fn complete(json: &Value) -> Result<Value> {
    let given = |name: &str| json.get(name).filter(|value| !value.is_null());
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = given(name) {
            return bad(format!("{name} {cap} is not supported (Gemma 3 has none)"));
        }
    }
    if let Some(value) = given("use_bidirectional_attention").filter(|value| **value != json!(false)) {
        return bad(format!(
            "use_bidirectional_attention {value} is not supported (only causal attention is)"
        ));
    }
    let mut full = json.clone();
    let mut default = |name: &str, value: Value| {
        if full.get(name).is_none_or(Value::is_null) {
            full[name] = value;
        }
    };
    default("head_dim", json!(HEAD_DIM));
    default("query_pre_attn_scalar", json!(HEAD_DIM));
    default("tie_word_embeddings", json!(true));
    default("layer_types", layer_types(json)?);
    full["rope_parameters"] = rope_parameters(json)?;
    Ok(full)
}

/// Returns the type of every layer: each `sliding_window_pattern`-th one has full attention.
fn layer_types(json: &Value) -> Result<Value> {
    let pattern = json.get("sliding_window_pattern").filter(|value| !value.is_null());
    let pattern = match pattern.map_or(Some(PATTERN), Value::as_u64) {
        Some(pattern) if pattern > 0 => pattern,
        _ => {
            let value = &json["sliding_window_pattern"];
            return bad(format!("sliding_window_pattern {value} is not a positive number"));
        }
    };
    let layers = json.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0).min(MAX_LAYERS as u64);
    let types = (1..=layers).map(|layer| if layer.is_multiple_of(pattern) { FULL } else { SLIDING });
    Ok(types.collect())
}

/// Returns the rotary parameters by layer type. In transformers 4, only layers with full attention have the
/// scaling, and each layer type has its own field for the base.
fn rope_parameters(json: &Value) -> Result<Value> {
    let given = |name: &str| json.get(name).filter(|value| !value.is_null());
    let by_type = given("rope_parameters");
    if by_type.is_some_and(|by_type| by_type.get(FULL).is_none() && by_type.get(SLIDING).is_none()) {
        return bad(format!("rope_parameters has neither {FULL} nor {SLIDING}"));
    }
    let of = |kind: &str, scaling: Option<&Value>, field: &str, theta: f64| {
        let mut parameters = by_type.and_then(|by_type| by_type.get(kind)).cloned();
        let parameters = parameters.get_or_insert_with(|| json!({}));
        // Of both names, the fields of the old one count.
        for given in [Some(&*parameters), scaling].into_iter().flatten() {
            if !given.is_object() {
                return bad(format!("the rope parameters of {kind} are {given}, not an object"));
            }
        }
        for (name, value) in scaling.and_then(Value::as_object).into_iter().flatten() {
            parameters[name] = value.clone();
        }
        if parameters.get("rope_theta").is_none_or(Value::is_null) {
            parameters["rope_theta"] = given(field).cloned().unwrap_or(json!(theta));
        }
        Ok(parameters.take())
    };
    Ok(json!({
        FULL: of(FULL, given("rope_scaling"), "rope_theta", 1e6)?,
        SLIDING: of(SLIDING, None, "rope_local_base_freq", 1e4)?,
    }))
}

/// Returns the factor for embeddings: the root of their width.
// Decision: docs/decisions/models.md#gemmas-embeddings-are-scaled-in-the-checkpoints-type
pub(super) fn embedding_scale(json: &Value, hidden_size: usize) -> f32 {
    let scale = (hidden_size as f64).sqrt();
    let dtype = ["dtype", "torch_dtype"].iter().find_map(|name| json.get(*name)?.as_str());
    match dtype {
        Some("bfloat16") => bf16::from_f64(scale).to_f32(),
        Some("float16") => f16::from_f64(scale).to_f32(),
        _ => scale as f32,
    }
}

/// Returns the number whose inverse root scales `q·k`.
pub(super) fn query_scalar(json: &Value) -> Result<f64> {
    let value = json.get("query_pre_attn_scalar");
    value.and_then(Value::as_f64).filter(|scalar| *scalar > 0.0).ok_or_else(|| {
        let value = value.unwrap_or(&Value::Null);
        Error::Config(format!("query_pre_attn_scalar {value} is not a positive number"))
    })
}

#[cfg(test)]
mod tests {
    use kvcore::{RopeConfig, RopeScaling};
    use serde_json::{Value, json};

    use crate::config::{Family, ModelConfig};

    /// Returns the config of a small model with the given fields.
    fn config(fields: Value) -> Result<ModelConfig, String> {
        let mut config = json!({
            "model_type": "gemma3_text", "vocab_size": 10, "hidden_size": 640, "intermediate_size": 16,
            "num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "sliding_window": 8,
        });
        let Value::Object(fields) = fields else { panic!("fields of a config") };
        config.as_object_mut().unwrap().extend(fields);
        ModelConfig::from_json(&config.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_old_scaling_beside_new_parameters_is_of_layers_with_full_attention() {
        let by_type = json!({
            "full_attention": {"rope_type": "default", "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        });
        let scaling = json!({"rope_type": "linear", "factor": 8.0});
        let both = config(json!({"rope_parameters": by_type, "rope_scaling": scaling})).unwrap();
        let merged = json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        });
        assert_eq!(both, config(json!({"rope_parameters": merged})).unwrap());
        for absent in [json!({}), json!(null)] {
            let one = config(json!({"rope_parameters": by_type, "rope_scaling": absent})).unwrap();
            assert_eq!(one, config(json!({"rope_parameters": by_type})).unwrap());
        }
    }

    #[test]
    fn both_generations_of_configs_mean_the_same() {
        let scaling = json!({"rope_type": "linear", "factor": 8.0});
        let four = config(json!({
            "rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": scaling, "sliding_window_pattern": 3,
        }));
        let (local, global) = ("sliding_attention", "full_attention");
        let five = config(json!({
            "layer_types": [local, local, global, local, local, global, local],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        }));
        let four = four.unwrap();
        assert_eq!(four, five.unwrap());
        let layers = four.layers.iter().map(|layer| (layer.window, layer.rope.theta)).collect::<Vec<_>>();
        assert_eq!(layers[1..4], [(Some(8), 500.0), (None, 2e6), (Some(8), 500.0)]);
        assert_eq!(four.layers[2].rope.scaling, RopeScaling::Linear { factor: 8.0 });
    }

    #[test]
    fn missing_fields_mean_transformers_defaults() {
        let model = config(json!({"head_dim": null, "sliding_window": 512})).unwrap();
        assert_eq!((model.family, model.head_dim, model.tied_head), (Family::Gemma3, 256, true));
        assert_eq!((model.softmax_scale, model.shifted_norms), (1.0 / 16.0, true));
        let windows: Vec<_> = model.layers.iter().map(|layer| layer.window.is_some()).collect();
        assert_eq!(windows, [true, true, true, true, true, false, true]);
        assert_eq!(model.layers[0].rope, RopeConfig::new(256, 1e4));
        assert_eq!(model.layers[5].rope, RopeConfig::new(256, 1e6));
        assert_eq!(config(json!({"query_pre_attn_scalar": 4})).unwrap().softmax_scale, 0.5);
    }

    #[test]
    fn embeddings_are_scaled_in_the_type_of_the_checkpoint() {
        let scale = |dtype: Value| config(dtype).unwrap().embedding_scale;
        assert_eq!(scale(json!({})), Some(640f32.sqrt()));
        assert_eq!(scale(json!({"dtype": "float32"})), Some(640f32.sqrt()));
        assert_eq!(scale(json!({"torch_dtype": "bfloat16"})), Some(25.25));
        assert_eq!(scale(json!({"dtype": "float16"})), Some(25.296_875));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (fields, name) in [
            (json!({"hidden_activation": "relu"}), "hidden_activation \"relu\""),
            (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping 50.0"),
            (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping 30.0"),
            (json!({"use_bidirectional_attention": true}), "use_bidirectional_attention true"),
            (json!({"sliding_window_pattern": 0}), "sliding_window_pattern 0"),
            (json!({"sliding_window_pattern": "LLLG"}), "sliding_window_pattern \"LLLG\""),
            (json!({"sliding_window": null}), "sliding_window null"),
            (json!({"query_pre_attn_scalar": -1}), "query_pre_attn_scalar -1"),
            (json!({"rope_local_base_freq": "1e4"}), "rope_theta is \"1e4\""),
            (json!({"rope_parameters": {"rope_theta": 1e6}}), "neither full_attention"),
            (json!({"rope_scaling": 8}), "not an object"),
            (json!({"model_type": "gemma3"}), "gemma3_text"),
            (json!({"model_type": "gemma2"}), "model_type \"gemma2\""),
        ] {
            let error = config(fields).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
