//! Sliding windows in a config.json, layer by layer.

use serde_json::Value;

use super::{Family, bad};
use crate::error::Result;

/// The supported layer types.
pub(super) const LAYER_TYPES: [&str; 2] = [FULL, SLIDING];
/// The layer type with full attention.
pub(super) const FULL: &str = "full_attention";
/// The layer type with a sliding window.
pub(super) const SLIDING: &str = "sliding_attention";

// Decision: docs/decisions/models.md#a-missing-sliding_window-means-transformers-default
/// transformers' default window, for a config that does not specify one.
const DEFAULT_WINDOW: u64 = 4096;
/// transformers' default number of layers before the first one with a window.
const DEFAULT_FULL_LAYERS: u64 = 28;

/// Returns the type and the window of every layer. With a window of `n`, a token sees itself and the `n − 1`
/// tokens before it.
pub(super) fn windows(
    json: &Value,
    family: Family,
    layers: usize,
) -> Result<Vec<(&'static str, Option<usize>)>> {
    let window = window(json, family)?;
    let types = layer_types(json, layers)?;
    let full_layers = json.get("max_window_layers").and_then(Value::as_u64).unwrap_or(DEFAULT_FULL_LAYERS);
    let slides = |layer: usize| match family {
        Family::Mistral => true,
        Family::Qwen2 | Family::Qwen3 => layer as u64 >= full_layers,
        // Gemma 3's config has been completed with layer types.
        Family::Llama | Family::DeepSeekV3 | Family::Gemma3 => false,
    };
    let of_layer = |layer: usize| match (types.as_ref().map(|types| types[layer]), window) {
        (Some(SLIDING), None) => {
            bad(format!("layer_types[{layer}] is {SLIDING:?}, but {family:?} has no active sliding_window"))
        }
        (Some(SLIDING), Some(_)) => Ok((SLIDING, window)),
        (None, Some(_)) if slides(layer) => Ok((SLIDING, window)),
        _ => Ok((FULL, None)),
    };
    (0..layers).map(of_layer).collect()
}

/// Returns the window of the layers that have one, or `None` if the family or the config does not use
/// windows. If the field is missing, transformers' default applies; `null` means that there is no window.
fn window(json: &Value, family: Family) -> Result<Option<usize>> {
    let in_use = match family {
        Family::Mistral | Family::Gemma3 => true,
        Family::Qwen2 | Family::Qwen3 => {
            json.get("use_sliding_window").and_then(Value::as_bool).unwrap_or(false)
        }
        Family::Llama | Family::DeepSeekV3 => false,
    };
    match json.get("sliding_window") {
        _ if !in_use => Ok(None),
        None => Ok(Some(DEFAULT_WINDOW as usize)),
        Some(Value::Null) if family != Family::Gemma3 => Ok(None),
        Some(value) => match value.as_u64() {
            None | Some(0) => bad(format!("sliding_window {value} is not a positive number")),
            Some(window) => Ok(Some(window as usize)),
        },
    }
}

fn layer_types(json: &Value, layers: usize) -> Result<Option<Vec<&'static str>>> {
    let Some(list) = json.get("layer_types").and_then(Value::as_array) else { return Ok(None) };
    if list.len() != layers {
        return bad(format!("layer_types has {} entries, but num_hidden_layers is {layers}", list.len()));
    }
    let known = |value: &Value| {
        let found = LAYER_TYPES.into_iter().find(|name| value.as_str() == Some(name));
        found.map_or_else(
            || bad(format!("layer type {value} is not supported (supported: {FULL} and {SLIDING})")),
            Ok,
        )
    };
    Ok(Some(list.iter().map(known).collect::<Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;

    fn windows_of(family: &str, more: &str) -> Result<Vec<Option<usize>>> {
        let text = format!(
            r#"{{"model_type":"{family}","vocab_size":10,"hidden_size":8,"intermediate_size":16,"num_hidden_layers":3,
            "num_attention_heads":2,"rms_norm_eps":1e-5,"max_position_embeddings":64{more}}}"#
        );
        Ok(ModelConfig::from_json(&text)?.layers.iter().map(|layer| layer.window).collect())
    }

    #[test]
    fn every_layer_of_mistral_slides_unless_the_config_says_null() {
        assert_eq!(windows_of("mistral", r#","sliding_window":8"#).unwrap(), [Some(8); 3]);
        assert_eq!(windows_of("mistral", r#","sliding_window":null"#).unwrap(), [None; 3]);
        assert_eq!(windows_of("mistral", "").unwrap(), [Some(4096); 3]);
    }

    #[test]
    fn qwen_slides_from_a_layer_on_if_it_is_told_to() {
        let qwen = |more: &str| windows_of("qwen2", &format!(r#","sliding_window":8{more}"#)).unwrap();
        assert_eq!(qwen(""), [None; 3]);
        assert_eq!(qwen(r#","use_sliding_window":true,"max_window_layers":1"#), [None, Some(8), Some(8)]);
        assert_eq!(qwen(r#","use_sliding_window":true"#), [None; 3]);
        let types = r#","layer_types":["sliding_attention","full_attention","sliding_attention"]"#;
        assert_eq!(qwen(&format!(r#","use_sliding_window":true{types}"#)), [Some(8), None, Some(8)]);
    }

    #[test]
    fn contradictory_windows_are_refused() {
        for (family, more, name) in [
            ("mistral", r#","sliding_window":0"#, "sliding_window 0"),
            ("mistral", r#","sliding_window":"all""#, "sliding_window"),
            ("qwen3", r#","layer_types":["full_attention"]"#, "layer_types has 1"),
            (
                "qwen3",
                r#","layer_types":["full_attention","full_attention","linear_attention"]"#,
                "linear_attention",
            ),
            (
                "qwen3",
                r#","sliding_window":8,"layer_types":["full_attention","sliding_attention","full_attention"]"#,
                "layer_types[1]",
            ),
        ] {
            let error = windows_of(family, more).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
