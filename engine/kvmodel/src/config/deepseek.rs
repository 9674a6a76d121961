//! The parts of a config that are specific to DeepSeek-V3: latent attention and routed experts.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{MAX_WIDTH, bad};
use crate::error::{Error, Result};

/// The projection widths of multi-head latent attention (DeepSeek-AI, 2024).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatentConfig {
    /// The width that queries are compressed to; `None` if they are not compressed.
    pub q_lora_rank: Option<usize>,
    /// The width of the latent that holds a token's keys and values.
    pub kv_lora_rank: usize,
    /// The number of elements in a head's query and key that are not rotated.
    pub qk_nope_head_dim: usize,
    /// The number of elements in a head's query and key that are rotated. All heads share the rotated part of
    /// the key.
    pub qk_rope_head_dim: usize,
    /// The number of elements in a head's value.
    pub v_head_dim: usize,
}

/// Routed experts of the feed-forward layer (DeepSeek-AI, 2024). An expert's score is the sigmoid of its
/// logit. A correction bias affects which experts are chosen, but not their weights. For each token, groups
/// are chosen first, and then experts from these groups.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertsConfig {
    /// The number of leading layers with a dense feed-forward layer. All later layers have experts.
    #[serde(rename = "first_k_dense_replace")]
    pub dense_layers: usize,
    /// The number of experts to choose from.
    #[serde(rename = "n_routed_experts")]
    pub routed: usize,
    /// The number of routed experts per token.
    #[serde(rename = "num_experts_per_tok")]
    pub per_token: usize,
    /// The number of shared experts, all of which process every token.
    #[serde(rename = "n_shared_experts")]
    pub shared: usize,
    /// The width of an expert.
    #[serde(rename = "moe_intermediate_size")]
    pub intermediate_size: usize,
    /// The number of groups that the experts are divided into, in order.
    #[serde(rename = "n_group")]
    pub groups: usize,
    /// The number of groups that a token's experts are chosen from.
    #[serde(rename = "topk_group")]
    pub groups_per_token: usize,
    /// True if the weights of a token's experts are divided by their sum.
    #[serde(rename = "norm_topk_prob")]
    pub normalise: bool,
    /// The factor applied to the weights of a token's experts.
    #[serde(rename = "routed_scaling_factor")]
    pub scale: f64,
}

impl LatentConfig {
    pub(super) fn read(json: &Value) -> Result<Self> {
        let latent = Self::deserialize(json).map_err(|e| Error::Config(e.to_string()))?;
        for (what, width) in [
            ("q_lora_rank", latent.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", latent.kv_lora_rank),
            ("qk_nope_head_dim", latent.qk_nope_head_dim),
            ("qk_rope_head_dim", latent.qk_rope_head_dim),
            ("v_head_dim", latent.v_head_dim),
        ] {
            if width == 0 || width > MAX_WIDTH {
                return bad(format!("{what} {width} is not in 1..={MAX_WIDTH}"));
            }
        }
        let heads = |name: &str| json.get(name).and_then(Value::as_u64);
        match (heads("num_attention_heads"), heads("num_key_value_heads")) {
            (Some(queries), Some(keys)) if queries != keys => bad(format!(
                "num_key_value_heads {keys} differs from num_attention_heads {queries}; they must be equal for latent \
                 attention"
            )),
            _ => Ok(latent),
        }
    }

    /// Returns the number of elements in a head's query and key before absorption. The softmax scale is
    /// derived from this number.
    pub fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }
}

impl ExpertsConfig {
    pub(super) fn read(json: &Value) -> Result<Self> {
        for (name, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
            match json.get(name).and_then(Value::as_str) {
                Some(other) if other != known => {
                    return bad(format!("{name} {other:?} is not supported (only {known} is)"));
                }
                _ => {}
            }
        }
        match json.get("moe_layer_freq") {
            Some(every) if every.as_u64().is_some_and(|every| every != 1) => {
                return bad(format!("moe_layer_freq {every} is not supported (only 1 is)"));
            }
            _ => {}
        }
        let experts = Self::deserialize(json).map_err(|e| Error::Config(e.to_string()))?;
        let Self { routed, per_token, groups, groups_per_token, intermediate_size, shared, .. } = experts;
        for (what, value) in [
            ("n_routed_experts", routed),
            ("num_experts_per_tok", per_token),
            ("n_group", groups),
            ("topk_group", groups_per_token),
            ("moe_intermediate_size", intermediate_size),
        ] {
            if value == 0 {
                return bad(format!("{what} is 0"));
            }
        }
        if shared.checked_mul(intermediate_size).is_none() {
            return bad(format!("n_shared_experts {shared} of {intermediate_size} overflow"));
        }
        if !routed.is_multiple_of(groups) || routed / groups < 2 {
            return bad(format!(
                "n_routed_experts {routed} cannot be divided into n_group {groups} equal groups of two or \
                 more"
            ));
        }
        if groups_per_token > groups {
            return bad(format!("topk_group {groups_per_token} is above n_group {groups}"));
        }
        let choice = routed / groups * groups_per_token;
        if per_token > choice {
            return bad(format!(
                "num_experts_per_tok {per_token} is above the {choice} experts in topk_group {groups_per_token} groups"
            ));
        }
        if !experts.scale.is_finite() {
            return bad(format!("routed_scaling_factor {} is not finite", experts.scale));
        }
        Ok(experts)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::ModelConfig;
    use serde_json::{Value, json};

    fn config(field: &str, value: Value) -> Result<ModelConfig, String> {
        let mut config = json!({
            "model_type": "deepseek_v3", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "q_lora_rank": null, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 4, "n_group": 4,
            "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        });
        config[field] = value;
        ModelConfig::from_json(&config.to_string()).map_err(|e| e.to_string())
    }

    #[test]
    fn only_the_rotated_part_of_a_key_has_positions() {
        let model = config("rope_interleave", Value::Null).unwrap();
        assert_eq!((model.head_dim, model.layers[0].rope.rotary_dim), (10, 4));
        assert_eq!(model.layers[0].rope.pairing, kvcore::Pairing::Interleaved);
        let model = config("rope_interleave", json!(false)).unwrap();
        assert_eq!(model.layers[0].rope.pairing, kvcore::Pairing::HalfSplit);
    }

    #[test]
    fn mscale_all_dim_scales_the_softmax() {
        let plain = config("q_lora_rank", json!(8)).unwrap().softmax_scale;
        let yarn = json!({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0});
        let scaled = config("rope_scaling", yarn.clone()).unwrap();
        let mscale = 0.1 * 4f32.ln() + 1.0;
        assert!((scaled.softmax_scale / plain - mscale * mscale).abs() < 1e-6);
        assert_eq!(scaled.layers[0].rope.attention_factor(), 1.0);
        let json = json!({"rope_parameters": null, "max_position_embeddings": 64, "rope_scaling": yarn});
        let factor = crate::config::rope::softmax_factor(&json);
        assert!((factor - f64::from(mscale * mscale)).abs() < 1e-6, "null counts as absent");
    }

    #[test]
    fn contradictory_configs_are_refused_by_field() {
        for (field, value, name) in [
            ("kv_lora_rank", json!(0), "kv_lora_rank 0"),
            ("kv_lora_rank", json!("wide"), "wide"),
            ("qk_rope_head_dim", json!(3), "rotary_dim 3"),
            ("v_head_dim", json!(1u64 << 40), "v_head_dim"),
            ("num_key_value_heads", json!(1), "num_key_value_heads 1"),
            ("n_group", json!(3), "n_group 3"),
            ("n_group", json!(8), "n_group 8"),
            ("topk_group", json!(5), "topk_group 5"),
            ("num_experts_per_tok", json!(5), "num_experts_per_tok 5"),
            ("num_experts_per_tok", json!(0), "num_experts_per_tok is 0"),
            ("n_shared_experts", json!(usize::MAX), "n_shared_experts"),
            ("scoring_func", json!("softmax"), "scoring_func"),
            ("topk_method", json!("greedy"), "topk_method"),
            ("moe_layer_freq", json!(2), "moe_layer_freq 2"),
        ] {
            let error = config(field, value).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
