//! Output heads beside embeddings that the config ties them to: a head with other elements is used and named, whichever
//! type it has and whichever file it is in.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use kvmodel::{Error, ModelDirectory, WeightFormat};
use rstest::rstest;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::common::folder;
use crate::gguf::{Draft, converted, load};
use crate::greedy::answer;

const HEAD: &str = "lm_head.weight";
const TABLE: &str = "model.embed_tokens.weight";
const NOTE: &str = "another lm_head.weight, which is used";

/// A tensor: its type, shape and bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// Returns the tensors of a golden model that has a head of its own.
fn tensors() -> BTreeMap<String, Tensor> {
    let file = std::fs::read(folder("qwen3").join("model.safetensors")).unwrap();
    let of = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    SafeTensors::deserialize(&file)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, of(view)))
        .collect()
}

/// Returns an f32 tensor with each element rounded to a type, and the rounded elements in f32.
fn rounded((_, shape, bytes): &Tensor, dtype: Dtype) -> (Tensor, Tensor) {
    let values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
    let (mut few, mut wide) = (Vec::new(), Vec::new());
    for value in values {
        let value = if dtype == Dtype::BF16 {
            let value = bf16::from_f32(value);
            few.extend(value.to_le_bytes());
            value.to_f32()
        } else {
            let value = f16::from_f32(value);
            few.extend(value.to_le_bytes());
            value.to_f32()
        };
        wide.extend(value.to_le_bytes());
    }
    ((dtype, shape.clone(), few), (Dtype::F32, shape.clone(), wide))
}

/// Writes a model whose config says that the head is tied, or not. The tensors are in one file, or in three shards of
/// which one contains the head and another one the embeddings.
fn write(dir: &Path, tensors: &BTreeMap<String, Tensor>, tied: bool, shards: bool) {
    let config = std::fs::read_to_string(folder("qwen3").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["tie_word_embeddings"] = json!(tied);
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer.json"), include_str!("../words.json")).unwrap();
    let file_of = |name: &str| match name {
        _ if !shards => "model.safetensors",
        HEAD => "a.safetensors",
        TABLE => "b.safetensors",
        _ => "c.safetensors",
    };
    let mut files: BTreeMap<&str, Vec<(&str, TensorView<'_>)>> = BTreeMap::new();
    for (name, (dtype, shape, bytes)) in tensors {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        files.entry(file_of(name)).or_default().push((name, view));
    }
    for (file, tensors) in files {
        std::fs::write(dir.join(file), safetensors::serialize(tensors, None).unwrap()).unwrap();
    }
    if shards {
        let map: BTreeMap<&String, &str> = tensors.keys().map(|name| (name, file_of(name))).collect();
        let index = json!({ "weight_map": map }).to_string();
        std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    }
}

/// Loads the model, and returns its notes and the logits of an answer.
fn loaded(tensors: &BTreeMap<String, Tensor>, tied: bool, shards: bool) -> (String, Vec<Vec<f32>>) {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), tensors, tied, shards);
    let ModelDirectory { model, notes, .. } =
        ModelDirectory::load(place.path(), WeightFormat::Stored, &mut |_, _| ()).unwrap();
    (notes.join("; "), answer(&model, &[1, 5, 9, 13], 3))
}

#[rstest]
fn another_head_in_the_files_is_used_and_said(
    #[values(Dtype::F32, Dtype::F16, Dtype::BF16)] dtype: Dtype,
    #[values(false, true)] shards: bool,
) {
    let mut tensors = tensors();
    if dtype != Dtype::F32 {
        let (few, _) = rounded(&tensors[HEAD], dtype);
        tensors.insert(HEAD.to_owned(), few);
    }
    let (notes, logits) = loaded(&tensors, true, shards);
    assert!(notes.contains(NOTE), "{notes}");
    let own = loaded(&tensors, false, shards);
    assert_eq!(own, (String::new(), logits.clone()));
    tensors.remove(HEAD);
    assert_ne!(loaded(&tensors, true, shards).1, logits, "the two heads differ");
}

/// A single element makes another head.
#[rstest]
fn a_head_that_differs_in_one_element_is_used(#[values(0, 777, 48 * 32 - 1)] at: usize) {
    let mut tensors = tensors();
    let mut head = tensors[TABLE].clone();
    head.2[4 * at..4 * at + 4].copy_from_slice(&1.5f32.to_le_bytes());
    tensors.insert(HEAD.to_owned(), head);
    let (notes, logits) = loaded(&tensors, true, false);
    assert!(notes.contains(NOTE), "{notes}");
    assert_eq!(loaded(&tensors, false, false).1, logits);
}

#[rstest]
fn a_head_that_equals_the_embeddings_is_no_other_head(
    #[values(Dtype::F32, Dtype::F16, Dtype::BF16)] dtype: Dtype,
    #[values(false, true)] swapped: bool,
    #[values(false, true)] shards: bool,
) {
    let mut tensors = tensors();
    let (few, wide) = match dtype {
        Dtype::F32 => (tensors[TABLE].clone(), tensors[TABLE].clone()),
        dtype => rounded(&tensors[TABLE], dtype),
    };
    let (head, table) = if swapped { (wide, few) } else { (few, wide) };
    tensors.insert(HEAD.to_owned(), head);
    tensors.insert(TABLE.to_owned(), table);
    let both = loaded(&tensors, true, shards);
    assert_eq!(both.0, "");
    tensors.remove(HEAD);
    assert_eq!(loaded(&tensors, true, shards), both, "as without a head");
}

#[test]
fn a_head_of_another_shape_is_named() {
    let mut tensors = tensors();
    let (dtype, mut shape, mut bytes) = tensors[TABLE].clone();
    shape[0] += 1;
    bytes.extend([0; 4 * 32]);
    tensors.insert(HEAD.to_owned(), (dtype, shape, bytes));
    for shards in [false, true] {
        let place = tempfile::tempdir().unwrap();
        write(place.path(), &tensors, true, shards);
        let error = load(place.path()).map(drop).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::File { .. }), "{error:?}");
        let file = if shards { "a.safetensors" } else { "model.safetensors" };
        let expected = format!("{file}: tensor \"lm_head.weight\" has shape [49, 32], but");
        assert!(said.contains(&expected), "{said}");
    }
}

/// GGUF files have no field that ties the head: it is tied if the file has none.
#[test]
fn a_gguf_file_has_the_head_that_is_in_it() {
    let said = |draft: &Draft| {
        let place = tempfile::tempdir().unwrap();
        let ModelDirectory { model, notes, .. } = load(&draft.write(place.path())).unwrap();
        (notes, answer(&model, &[1, 5, 9, 13], 3))
    };
    let mut draft = converted("qwen3");
    let (own, table) = (said(&draft), draft.tensor("token_embd.weight").clone());
    assert!(own.0.is_empty(), "{:?}", own.0);
    let head = draft.tensor("output.weight").clone();
    let f16s = |bytes: &[u8]| -> Vec<u8> {
        let values = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
        values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()
    };
    let half = f16s(&head.3);
    *draft.tensor("output.weight") = ("output.weight".to_owned(), head.1, 1, half);
    let half = said(&draft);
    assert!(half.0.is_empty() && half.1 != own.1, "a head of another type: {:?}", half.0);
    draft.tensors.retain(|tensor| tensor.0 != "output.weight");
    let tied = said(&draft);
    assert!(tied.0.is_empty() && tied.1 != own.1, "no head: {:?}", tied.0);
    draft.tensors.push(("output.weight".to_owned(), table.1, table.2, table.3));
    assert_eq!(said(&draft), tied, "a head that equals the embeddings");
}
