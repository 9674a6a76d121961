//! Converts a GGUF file's tensors to the names and the row order of Hugging Face models.

use kvcore::RopeScaling;

use super::failure::{AGAIN, GgufFailure, wrong};
use super::fields::{Header, TensorPlace};
use super::places::{PlacedTensor, placed};
use crate::config::{Family, ModelConfig};
use crate::dense::{SharedBytes, StoredType, StoredWeight};
use crate::weights::Weights;

/// The name of the tensor that contains the divisors for the frequencies of a scaled RoPE.
const FACTORS: &str = "rope_freqs.weight";

/// The tensors outside the layers: their names in the file and in a Hugging Face model.
const WHOLE: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// The parts of a layer: their names in the file, and their names after `model.layers.N` in a Hugging
/// Face model.
const PARTS: [(&str, &str); 10] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The norms around the feed-forward layer and after attention, as in [`PARTS`].
fn norms(family: Family) -> &'static [(&'static str, &'static str)] {
    match family {
        Family::Gemma3 => &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        _ => &[("ffn_norm", "post_attention_layernorm")],
    }
}

/// Returns the tensor's name in a Hugging Face model of the family, or `None` if these models have no such
/// tensor.
fn name_of(tensor: &str, family: Family) -> Option<String> {
    if let Some((_, name)) = WHOLE.iter().find(|(known, _)| *known == tensor) {
        return Some((*name).to_owned());
    }
    let (layer, rest) = tensor.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let (_, name) = PARTS.iter().chain(norms(family)).find(|(known, _)| *known == part)?;
    Some(format!("model.layers.{layer}.{name}.{kind}"))
}

/// Returns the name in the file for a tensor of a Hugging Face model of the family.
pub(super) fn name_in_file(name: &str, family: Family) -> String {
    let of_layer = || {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        let (short, _) = PARTS.iter().chain(norms(family)).find(|(_, known)| *known == part)?;
        Some(format!("blk.{layer}.{short}.{kind}"))
    };
    let whole = WHOLE.iter().find(|(_, known)| *known == name).map(|(short, _)| (*short).to_owned());
    whole.or_else(of_layer).unwrap_or_else(|| name.to_owned())
}

/// Returns the file's tensors as weights of a Hugging Face model. RoPE frequency divisors are added to the
/// config instead.
pub(super) fn weights(
    header: &Header,
    config: &mut ModelConfig,
    file: &SharedBytes,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Weights, GgufFailure> {
    let total = (file.len() as u64).saturating_sub(header.data);
    let (mut tensors, mut unknown) = (Vec::new(), Vec::new());
    for placed in placed(header, file.len())? {
        let place = placed.place;
        let name = if place.name == FACTORS {
            Some(FACTORS.to_owned())
        } else {
            name_of(&place.name, config.family)
        };
        let Some(name) = name else {
            unknown.push(place.name.clone());
            continue;
        };
        let stored = read(&placed, name, file)?;
        progress(place.offset + stored.bytes().len() as u64, total);
        if place.name == FACTORS {
            add_factors(config, &stored)?;
            continue;
        }
        tensors.push(in_order(stored, place, config)?);
    }
    progress(total, total);
    Ok(Weights::from_stored(tensors).with_unknown(unknown))
}

fn read(placed: &PlacedTensor<'_>, name: String, file: &SharedBytes) -> Result<StoredWeight, GgufFailure> {
    let place = placed.place;
    let Some(dtype) = placed.dtype else {
        let read: Vec<String> = StoredType::ALL.iter().map(ToString::to_string).collect();
        let (name, got) = (&place.name, place.dtype);
        return wrong(format!(
            "tensor {name:?} has the ggml element type {got} (supported: {}); use a file with a supported type",
            read.join(", ")
        ));
    };
    let Some(contents) = file.part(placed.bytes.clone()) else {
        return wrong(format!("tensor {:?} extends past the end of the file; {AGAIN}", place.name));
    };
    Ok(StoredWeight::new(name, dtype, &place.shape, contents)?)
}

/// Reorders the rows of query and key projections as in Hugging Face models.
///
/// For the architecture "llama", llama.cpp rotates pairs of neighbouring elements. GGUF files therefore store
/// rows `i` and `i + head_dim / 2` of each head next to each other.
fn in_order(
    stored: StoredWeight,
    place: &TensorPlace,
    config: &ModelConfig,
) -> Result<StoredWeight, GgufFailure> {
    let heads = match place.name.rsplit('.').nth(1) {
        Some("attn_q") => config.heads,
        Some("attn_k") => config.kv_heads,
        _ => return Ok(stored),
    };
    if config.family != Family::Llama {
        return Ok(stored);
    }
    let (rows, dim) = (place.shape[0], config.head_dim);
    if rows != heads * dim {
        let (name, shape) = (&place.name, &place.shape);
        return wrong(format!(
            "tensor {name:?} has shape {shape:?}, but {heads} heads of {dim} rows are expected; {AGAIN}"
        ));
    }
    let row = stored.bytes().len() / rows;
    let mut bytes = Vec::with_capacity(stored.bytes().len());
    for head in 0..heads {
        for i in 0..dim {
            let from = head * dim + 2 * (i % (dim / 2)) + i / (dim / 2);
            bytes.extend_from_slice(&stored.bytes()[from * row..(from + 1) * row]);
        }
    }
    Ok(StoredWeight::new(stored.name(), stored.dtype(), stored.shape(), bytes)?)
}

/// Adds the frequency divisors to the rotary embedding of every layer.
fn add_factors(config: &mut ModelConfig, stored: &StoredWeight) -> Result<(), GgufFailure> {
    let factors: Vec<f64> = stored.to_f32().into_iter().map(f64::from).collect();
    for layer in &mut config.layers {
        if layer.rope.scaling != RopeScaling::None || factors.len() != layer.rope.rotary_dim / 2 {
            let (n, wanted) = (factors.len(), layer.rope.rotary_dim / 2);
            return wrong(format!(
                "{FACTORS:?} has {n} divisors, but {wanted} frequencies need one; {AGAIN}"
            ));
        }
        layer.rope.scaling = RopeScaling::LongRope {
            short_factor: factors.clone(),
            long_factor: factors.clone(),
            attention_factor: 1.0,
            original_max_position: config.max_positions,
        };
        layer
            .rope
            .check()
            .map_err(|error| GgufFailure::Wrong(format!("tensor {FACTORS:?}: {error}; {AGAIN}")))?;
    }
    Ok(())
}
