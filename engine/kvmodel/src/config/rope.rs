//! Rotary embeddings in a config.json. transformers 4 writes `rope_theta` and `rope_scaling`. transformers 5
//! combines the two in `rope_parameters`, either for all layers or by layer type.

use kvcore::{Pairing, RopeConfig, RopeScaling};
use serde_json::Value;

use super::bad;
use super::window::LAYER_TYPES;
use crate::error::{Error, Result};

/// Returns the rotary embedding for a layer of type `layer_type`, in which heads have `width` elements.
pub(super) fn rope(json: &Value, layer_type: &str, width: usize, pairing: Pairing) -> Result<RopeConfig> {
    let all = &of_all_layers(json);
    let by_type = LAYER_TYPES.iter().any(|name| all.get(name).is_some());
    let of_layer = if by_type {
        all.get(layer_type).ok_or_else(|| Error::Config(format!("rope_parameters lacks {layer_type}")))?
    } else {
        all
    };
    check_numbers(of_layer, &NUMBERS)?;
    check_numbers(json, &BESIDE)?;
    check_kind(of_layer)?;
    let parameters = Parameters { json, of_layer };
    let part =
        parameters.number("partial_rotary_factor").or_else(|| json.get("partial_rotary_factor")?.as_f64());
    let part = part.unwrap_or(1.0);
    if !(part > 0.0 && part <= 1.0) {
        return bad(format!("partial_rotary_factor {part} is not in 0..=1"));
    }
    let theta = parameters.number("rope_theta").or_else(|| json.get("rope_theta")?.as_f64());
    let config = RopeConfig {
        rotary_dim: (width as f64 * part) as usize,
        theta: theta.unwrap_or(10_000.0),
        pairing,
        scaling: parameters.scaling()?,
    };
    config.check().map_err(|e| Error::Config(format!("rope parameters: {e}")))?;
    Ok(config)
}

/// The numeric fields in the rotary parameters.
const NUMBERS: [&str; 12] = [
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "max_position_embeddings",
];

/// The numeric fields outside the rotary parameters.
const BESIDE: [&str; 4] =
    ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings"];

/// Rejects a field that is present but not a number, because a default would silently change the model, and a
/// number that overflows f32. The error names the field.
fn check_numbers(fields: &Value, names: &[&str]) -> Result<()> {
    let usable = |value: &Value| value.as_f64().is_some_and(|number| (number as f32).is_finite());
    let given = |name: &&str| fields.get(*name).filter(|value| !value.is_null() && !usable(value));
    match names.iter().find_map(|name| given(name).map(|value| (name, value))) {
        Some((name, value)) if value.is_number() => bad(format!("{name} is {value}, which is too large")),
        Some((name, value)) => bad(format!("{name} is {value}, not a number")),
        None => Ok(()),
    }
}

/// The fields that name the kind of scaling, newest first.
const KINDS: [&str; 2] = ["rope_type", "type"];

/// Rejects a kind of scaling that is not a string, and a factor without a kind, because ignoring them would
/// silently change the model.
fn check_kind(fields: &Value) -> Result<()> {
    let has = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
    if has("factor") && !KINDS.iter().any(|name| has(name)) {
        return bad(format!("factor is {}, but rope_type is missing; add \"rope_type\"", fields["factor"]));
    }
    let given = |name: &&str| fields.get(*name).filter(|value| !value.is_null() && !value.is_string());
    match KINDS.iter().find_map(|name| given(name).map(|value| (name, value))) {
        Some((name, value)) => bad(format!("{name} is {value}, not a name")),
        None => Ok(()),
    }
}

/// Returns the factor by which DeepSeek's YaRN multiplies the softmax scale: the square of the scale from its
/// `mscale_all_dim`. The attention factor on cos and sin affects only the rotated part of a key, while this
/// factor affects the whole key.
pub(super) fn softmax_factor(json: &Value) -> f64 {
    let parameters = Parameters { json, of_layer: &of_all_layers(json) };
    match (parameters.kind(), parameters.number("mscale_all_dim"), parameters.factor()) {
        ("default", ..) | (_, None, _) | (.., None) => 1.0,
        (_, Some(mscale), Some(factor)) => yarn_scale(factor, mscale).powi(2),
    }
}

/// Rejects rotary parameters that are not an object, and boolean fields that are neither true nor false. The
/// error names the field.
pub(super) fn check_shapes(json: &Value) -> Result<()> {
    let given = |of: &Value, name: &str| of.get(name).filter(|value| !value.is_null()).cloned();
    for name in ["rope_parameters", "rope_scaling"] {
        let Some(value) = given(json, name) else { continue };
        if !value.is_object() {
            return bad(format!("{name} is {value}, not an object"));
        }
        if let Some(truncate) = given(&value, "truncate").filter(|value| !value.is_boolean()) {
            return bad(format!("truncate is {truncate}, neither true nor false"));
        }
    }
    match given(json, "rope_interleave").filter(|value| !value.is_boolean()) {
        Some(value) => bad(format!("rope_interleave is {value}, neither true nor false")),
        None => Ok(()),
    }
}

/// Returns the rotary parameters, under their new or old name, or null. `null` counts as absent. Of both
/// names, transformers takes the old one, but keeps the base and the rotated part from the new one.
fn of_all_layers(json: &Value) -> Value {
    // Transformers takes an empty object of the old name as absent, too.
    let is_empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
    let given = |name: &str| json.get(name).filter(|value| !value.is_null());
    let old = given("rope_scaling").filter(|value| !is_empty(value));
    match (given("rope_parameters"), old) {
        (Some(new), Some(old)) if !LAYER_TYPES.iter().any(|name| new.get(name).is_some()) => {
            let mut both = old.clone();
            for name in ["rope_theta", "partial_rotary_factor"] {
                if let (Some(fields), Some(value)) = (both.as_object_mut(), new.get(name)) {
                    fields.entry(name).or_insert_with(|| value.clone());
                }
            }
            both
        }
        (Some(one), _) | (None, Some(one)) => one.clone(),
        (None, None) => Value::Null,
    }
}

/// The rotary parameters of one layer, with the config that contains them.
struct Parameters<'a> {
    json: &'a Value,
    of_layer: &'a Value,
}

impl Parameters<'_> {
    fn number(&self, name: &str) -> Option<f64> {
        self.of_layer.get(name).and_then(Value::as_f64)
    }

    fn need(&self, name: &str) -> Result<f64> {
        self.number(name).ok_or_else(|| Error::Config(format!("rope scaling lacks {name}")))
    }

    fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        let list = self.of_layer.get(name).and_then(Value::as_array);
        list.and_then(|list| list.iter().map(Value::as_f64).collect())
            .ok_or_else(|| Error::Config(format!("rope scaling lacks the list of numbers {name}")))
    }

    fn kind(&self) -> &str {
        KINDS.iter().find_map(|name| self.of_layer.get(*name)?.as_str()).unwrap_or("default")
    }

    /// Returns the config's `max_position_embeddings`.
    fn max_positions(&self) -> Result<usize> {
        let positions = self.json.get("max_position_embeddings").and_then(Value::as_u64);
        Ok(positions.ok_or_else(|| Error::Config("max_position_embeddings is missing".to_owned()))? as usize)
    }

    /// Returns the context length before extension. A value outside the rotary parameters takes precedence
    /// over a value inside them.
    fn original(&self) -> Result<usize> {
        let name = "original_max_position_embeddings";
        let value = self.json.get(name).and_then(Value::as_f64).or_else(|| self.number(name));
        value.map_or_else(|| self.max_positions(), |n| Ok(n as usize))
    }

    /// Returns the ratio of the extended to the original context length: from the config or, if it does not
    /// specify the ratio, computed from the two lengths.
    fn factor(&self) -> Option<f64> {
        let derived = || Some(self.max_positions().ok()? as f64 / self.original().ok()? as f64);
        self.number("factor").or_else(derived)
    }

    fn scaling(&self) -> Result<RopeScaling> {
        if let Some(section) = self.of_layer.get("mrope_section").filter(|section| !section.is_null()) {
            return bad(format!("mrope_section {section}: M-RoPE of images is not supported"));
        }
        Ok(match self.kind() {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: self.need("factor")? },
            // Decision: docs/decisions/base.md#static-ntk-has-the-rope-type-ntk
            "ntk" => RopeScaling::StaticNtk { factor: self.need("factor")? },
            // Decision: docs/decisions/base.md#dynamic-ntk-extends-the-model
            "dynamic" => RopeScaling::DynamicNtk {
                factor: self.need("factor")?,
                original_max_position: self.max_positions()?,
            },
            "llama3" => RopeScaling::Llama3 {
                factor: self.need("factor")?,
                low_freq_factor: self.need("low_freq_factor")?,
                high_freq_factor: self.need("high_freq_factor")?,
                original_max_position: self.original()?,
            },
            "yarn" => {
                let factor = self.factor().unwrap_or(1.0);
                RopeScaling::Yarn {
                    factor,
                    attention_factor: self
                        .number("attention_factor")
                        .unwrap_or_else(|| self.yarn_attention_factor(factor)),
                    beta_fast: self.number("beta_fast").unwrap_or(32.0),
                    beta_slow: self.number("beta_slow").unwrap_or(1.0),
                    original_max_position: self.original()?,
                    truncate: self.of_layer.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                }
            }
            "longrope" => {
                let (factor, original) = (self.factor().unwrap_or(1.0), self.original()?);
                let default = || match factor {
                    f if f <= 1.0 => 1.0,
                    f => (1.0 + f.ln() / (original as f64).ln()).sqrt(),
                };
                RopeScaling::LongRope {
                    short_factor: self.numbers("short_factor")?,
                    long_factor: self.numbers("long_factor")?,
                    attention_factor: self.number("attention_factor").unwrap_or_else(default),
                    original_max_position: original,
                }
            }
            "mrope" => return bad("rope type \"mrope\": M-RoPE of images is not supported".to_owned()),
            other => {
                return bad(format!(
                    "rope type {other:?} is not supported (supported: default, linear, ntk, dynamic, llama3, yarn and \
                     longrope)"
                ));
            }
        })
    }

    /// Returns YaRN's attention factor for a config that specifies none (Peng et al., 2023, and DeepSeek's
    /// `mscale`).
    fn yarn_attention_factor(&self, factor: f64) -> f64 {
        match (self.number("mscale"), self.number("mscale_all_dim")) {
            (Some(a), Some(b)) if a != 0.0 && b != 0.0 => yarn_scale(factor, a) / yarn_scale(factor, b),
            _ => yarn_scale(factor, 1.0),
        }
    }
}

/// Returns `0.1 mscale ln(factor) + 1` if the factor is above 1, otherwise 1.
fn yarn_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;
    use kvcore::Regime;

    fn config(more: &str) -> Result<ModelConfig> {
        ModelConfig::from_json(&format!(
            r#"{{"model_type":"qwen2","vocab_size":10,"hidden_size":16,"intermediate_size":16,"num_hidden_layers":2,
            "num_attention_heads":2,"rms_norm_eps":1e-5,"max_position_embeddings":64{more}}}"#
        ))
    }

    #[test]
    fn a_number_that_is_none_is_refused_by_name_wherever_it_stands() {
        for (field, more) in [
            ("rope_theta", r#","rope_theta":"1e6""#),
            ("rope_theta", r#","rope_parameters":{"rope_type":"default","rope_theta":[1e6]}"#),
            ("factor", r#","rope_scaling":{"rope_type":"linear","factor":"4"}"#),
            ("partial_rotary_factor", r#","partial_rotary_factor":true"#),
        ] {
            let refused = config(more).unwrap_err().to_string();
            assert!(
                refused.contains(&format!("{field} is ")) && refused.contains("not a number"),
                "{refused}"
            );
        }
        assert!(config(r#","rope_theta":null"#).is_ok(), "null is absence");
        let refused = config(r#","rope_scaling":{"rope_type":5,"factor":4}"#).unwrap_err().to_string();
        assert!(refused.contains("rope_type is 5, not a name"), "{refused}");
        for (what, more) in [
            ("rope_scaling is \"linear\", not an object", r#","rope_scaling":"linear""#),
            ("rope_parameters is [1], not an object", r#","rope_parameters":[1]"#),
            (
                "truncate is 1, neither true nor false",
                r#","rope_scaling":{"type":"yarn","factor":4,"truncate":1}"#,
            ),
            ("rope_interleave is \"no\", neither true nor false", r#","rope_interleave":"no""#),
        ] {
            let refused = config(more).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }

    #[test]
    fn of_both_names_the_old_one_counts_and_the_base_stays() {
        let rope = |more: &str| config(more).unwrap().layers[0].rope.clone();
        let new = r#""rope_parameters":{"rope_type":"default","rope_theta":5e5}"#;
        let yarn = r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":16}"#;
        assert_eq!(
            rope(&format!(r#",{new},"rope_scaling":{yarn}"#)),
            rope(&format!(r#","rope_theta":5e5,"rope_scaling":{yarn}"#))
        );
        let linear = rope(&format!(r#",{new},"rope_scaling":{{"type":"linear","factor":2.0}}"#));
        assert_eq!((linear.theta, linear.scaling), (5e5, RopeScaling::Linear { factor: 2.0 }));
        let own =
            rope(&format!(r#",{new},"rope_scaling":{{"type":"linear","factor":2.0,"rope_theta":7.0}}"#));
        assert_eq!(own.theta, 7.0);
        for absent in ["null", "{}"] {
            assert_eq!(rope(&format!(r#",{new},"rope_scaling":{absent}"#)), RopeConfig::new(8, 5e5));
            let of_new = rope(&format!(r#","rope_parameters":{yarn},"rope_scaling":{absent}"#));
            assert_eq!(of_new, rope(&format!(r#","rope_parameters":{yarn}"#)), "{absent}");
        }
    }

    #[test]
    fn layer_types_may_have_their_own_theta_and_scaling() {
        let types = r#","use_sliding_window":true,"sliding_window":8,"layer_types":["sliding_attention","full_attention"]"#;
        let ropes = |parameters: &str| config(&format!(r#"{types},"rope_parameters":{{{parameters}}}"#));
        let local = r#""sliding_attention":{"rope_type":"default","rope_theta":500.0}"#;
        let global = r#""full_attention":{"rope_type":"linear","factor":4.0,"rope_theta":1000000.0}"#;
        let layers = ropes(&format!("{local},{global}")).unwrap().layers;
        assert_eq!(layers[0].rope, RopeConfig::new(8, 500.0));
        let scaling = RopeScaling::Linear { factor: 4.0 };
        assert_eq!(layers[1].rope, RopeConfig { scaling, ..RopeConfig::new(8, 1e6) });
        assert!(ropes(local).unwrap_err().to_string().contains("lacks full_attention"));
    }

    #[test]
    fn dynamic_ntk_extends_the_model_and_others_do_not() {
        let of =
            |kind: &str| config(&format!(r#","rope_scaling":{{"type":"{kind}","factor":4.0}}"#)).unwrap();
        assert_eq!(of("dynamic").max_positions, 256);
        assert_eq!(["ntk", "linear", "yarn"].map(|kind| of(kind).max_positions), [64; 3]);
        let rope = &of("dynamic").layers[0].rope;
        assert_eq!((rope.regime(64), rope.regime(65)), (Regime::Original, Regime::Length(65)));
    }

    #[test]
    fn factors_of_longrope_are_given_or_follow_from_the_contexts() {
        let attention = |more: &str| {
            let lists = r#""short_factor":[1,1,1,1],"long_factor":[1,2,3,4]"#;
            config(&format!(r#","rope_scaling":{{"type":"longrope",{lists}{more}}}"#)).unwrap().layers[0]
                .rope
                .attention_factor()
        };
        // sqrt(1 + ln(64 / 16) / ln(16))
        assert_eq!(attention(r#","original_max_position_embeddings":16"#), 1.5f32.sqrt());
        assert_eq!(attention(""), 1.0);
        assert_eq!(attention(r#","attention_factor":1.25"#), 1.25);
    }
}
