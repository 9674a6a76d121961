//! The tensors of a GGUF file under the names, and in the order of rows, that Hugging Face models have.

use kvcore::RopeScaling;

use super::fields::{Header, Place};
use super::{Failure, wrong};
use crate::config::{Family, ModelConfig};
use crate::dense::{SharedBytes, StoredType, StoredWeight, bytes_of};
use crate::weights::Weights;

/// The divisors of frequencies that a rotary embedding was searched or computed with.
const FACTORS: &str = "rope_freqs.weight";

/// The parts of a layer: their names in the file, and below `model.layers.N`.
const PARTS: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Returns the name of a tensor in a Hugging Face model; none for tensors that no model here has.
fn name_of(tensor: &str) -> Option<String> {
    match tensor {
        "token_embd.weight" => return Some("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        "output.weight" => return Some("lm_head.weight".to_owned()),
        _ => {}
    }
    let (layer, rest) = tensor.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let (_, name) = PARTS.iter().find(|(known, _)| *known == part)?;
    Some(format!("model.layers.{layer}.{name}.{kind}"))
}

/// Reads the tensors. Divisors of frequencies go into the config.
pub(super) fn weights(
    header: &Header,
    config: &mut ModelConfig,
    file: &SharedBytes,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Weights, Failure> {
    let mut places: Vec<&Place> = header.tensors.iter().collect();
    places.sort_by_key(|place| place.offset);
    let total = (file.len() as u64).saturating_sub(header.data);
    let mut tensors = Vec::new();
    for place in places {
        let name = if place.name == FACTORS { Some(FACTORS.to_owned()) } else { name_of(&place.name) };
        let Some(name) = name else { continue };
        let stored = read(header, place, name, file)?;
        progress(place.offset + stored.bytes().len() as u64, total);
        if place.name == FACTORS {
            add_factors(config, &stored)?;
            continue;
        }
        tensors.push(in_order(stored, place, config)?);
    }
    progress(total, total);
    Ok(Weights::from_stored(tensors))
}

/// Returns the type with ggml's number.
fn type_of(number: u32) -> Option<StoredType> {
    Some(match number {
        0 => StoredType::F32,
        1 => StoredType::F16,
        2 => StoredType::Q4_0,
        3 => StoredType::Q4_1,
        6 => StoredType::Q5_0,
        7 => StoredType::Q5_1,
        8 => StoredType::Q8_0,
        10 => StoredType::Q2K,
        11 => StoredType::Q3K,
        12 => StoredType::Q4K,
        13 => StoredType::Q5K,
        14 => StoredType::Q6K,
        30 => StoredType::BF16,
        _ => return None,
    })
}

fn read(header: &Header, place: &Place, name: String, file: &SharedBytes) -> Result<StoredWeight, Failure> {
    let Some(dtype) = type_of(place.dtype) else {
        let read: Vec<String> = StoredType::ALL.iter().map(ToString::to_string).collect();
        let (name, got) = (&place.name, place.dtype);
        return wrong(format!(
            "tensor {name:?} has ggml's element type {got} ({} are read)",
            read.join(", ")
        ));
    };
    let bytes = bytes_of(dtype, &place.shape)
        .map_err(|problem| Failure::Wrong(format!("{} {problem}", place.name)))?;
    let start = header.data.checked_add(place.offset).and_then(|start| usize::try_from(start).ok());
    let range = start.and_then(|start| Some(start..start.checked_add(bytes)?));
    let Some(contents) = range.and_then(|range| file.part(range)) else {
        let (name, at, length) = (&place.name, place.offset, file.len());
        return wrong(format!(
            "tensor {name:?} of {bytes} bytes at {at} ends behind the file of {length} bytes"
        ));
    };
    Ok(StoredWeight::new(name, dtype, &place.shape, contents)?)
}

/// Puts rows of queries and keys in the order of Hugging Face models.
///
/// llama.cpp rotates neighbouring elements in its architecture "llama", and has the rows of each head in the order that this
/// needs: rows `i` and `i + head_dim / 2` one after the other.
fn in_order(stored: StoredWeight, place: &Place, config: &ModelConfig) -> Result<StoredWeight, Failure> {
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
            "tensor {name:?} has shape {shape:?}, {heads} heads of {dim} rows are expected"
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

/// Divides the frequencies of all layers.
fn add_factors(config: &mut ModelConfig, stored: &StoredWeight) -> Result<(), Failure> {
    let factors: Vec<f64> = stored.to_f32().into_iter().map(f64::from).collect();
    for layer in &mut config.layers {
        if layer.rope.scaling != RopeScaling::None || factors.len() != layer.rope.rotary_dim / 2 {
            let (n, wanted) = (factors.len(), layer.rope.rotary_dim / 2);
            return wrong(format!(
                "{n} divisors in {FACTORS:?} for {wanted} frequencies that are not scaled otherwise"
            ));
        }
        layer.rope.scaling = RopeScaling::LongRope {
            short_factor: factors.clone(),
            long_factor: factors.clone(),
            attention_factor: 1.0,
            original_max_position: config.max_positions,
        };
    }
    Ok(())
}
