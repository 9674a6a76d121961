//! Invalid model files: each error names the file, the tensor or field as named in the file, and a remedy.

use std::fs;
use std::path::{Path, PathBuf};

use kvmodel::{Error, Message, Role};
use rstest::rstest;
use serde_json::{Value, json};

use crate::common::folder;
use crate::gguf::{Draft, converted, counted, list, load, real, text, whole};

/// A change to a valid file.
type Change = fn(&mut Draft);

const AGAIN: &str = "download the file again, or convert the model again";

/// Moves the tensor with index `number` to another place.
fn move_tensor(draft: &mut Draft, number: usize, to: u64) {
    draft.places.insert(draft.tensors[number].0.clone(), to);
}

/// Removes one row from a tensor's shape and bytes.
fn shorten(draft: &mut Draft, name: &str) {
    let tensor = draft.tensor(name);
    let row = tensor.3.len() / tensor.1[0];
    tensor.1[0] -= 1;
    tensor.3.truncate(tensor.3.len() - row);
}

#[rstest]
#[case::overlap(|d: &mut Draft| move_tensor(d, 1, 0), &["\" at 0 and \"", "overlap; ", AGAIN])]
#[case::partial_overlap(|d: &mut Draft| move_tensor(d, 1, 32), &["\" at 32 overlap; ", AGAIN])]
#[case::unaligned(
    |d: &mut Draft| move_tensor(d, 0, 4),
    &["\" is at 4, which is not a multiple of the alignment 32 (general.alignment; default: 32); ", AGAIN]
)]
#[case::alignment(
    |d: &mut Draft| { d.set("general.alignment", whole(64)); move_tensor(d, 0, 32); },
    &["\" is at 32, which is not a multiple of the alignment 64"]
)]
#[case::odd_alignment(|d: &mut Draft| d.set("general.alignment", whole(48)), &["general.alignment is 48, which is not a \
     power of two"])]
#[case::twice(
    |d: &mut Draft| { let same = d.tensor("output_norm.weight").clone(); d.tensors.push(same); },
    &["tensor \"output_norm.weight\" occurs twice", AGAIN]
)]
#[case::shape(
    |d: &mut Draft| shorten(d, "blk.1.ffn_up.weight"),
    &["tensor \"blk.1.ffn_up.weight\" has shape [39, 32], but the fields require [40, 32]; ", AGAIN]
)]
#[case::missing(
    |d: &mut Draft| d.tensors.retain(|tensor| tensor.0 != "blk.1.ffn_up.weight"),
    &["tensor \"blk.1.ffn_up.weight\" is missing", AGAIN]
)]
#[case::missing_norm(
    |d: &mut Draft| d.tensors.retain(|tensor| tensor.0 != "output_norm.weight"),
    &["tensor \"output_norm.weight\" is missing"]
)]
#[case::no_layer(|d: &mut Draft| d.set("llama.block_count", whole(0)), &["llama.block_count is 0"])]
#[case::layers(|d: &mut Draft| d.set("llama.block_count", whole(99_999)), &["llama.block_count 99999 is above"])]
#[case::no_head(
    |d: &mut Draft| { d.set("llama.attention.head_count", whole(0)); d.set("llama.rope.dimension_count", whole(8)); },
    &["llama.attention.head_count is 0"]
)]
#[case::derived_no_head(
    |d: &mut Draft| {
        d.fields.remove("llama.attention.key_length");
        d.set("llama.attention.head_count", whole(0));
        d.set("llama.rope.dimension_count", whole(8));
    },
    &["llama.attention.head_count is 0"]
)]
#[case::groups(
    |d: &mut Draft| d.set("llama.attention.head_count_kv", whole(3)),
    &["llama.attention.head_count 4 is not a multiple of llama.attention.head_count_kv 3"]
)]
#[case::theta(|d: &mut Draft| d.set("llama.rope.freq_base", real(0.5)), &["llama.rope.freq_base 0.5 is not above 1"])]
#[case::divisors(
    |d: &mut Draft| {
        let divisors = (0..4).flat_map(|_| 0f32.to_le_bytes()).collect();
        d.tensors.push(("rope_freqs.weight".to_owned(), vec![4], 0, divisors));
    },
    &["tensor \"rope_freqs.weight\"", "0 is not positive"]
)]
#[case::merge(
    |d: &mut Draft| d.set("tokenizer.ggml.merges", list(8, ["A B C"].map(counted))),
    &["merge 0 of \"tokenizer.ggml.merges\" is \"A B C\": it is not two strings", "put the model's tokenizer.json"]
)]
fn a_bad_gguf_file_is_named_with_its_own_names(#[case] change: Change, #[case] expected: &[&str]) {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama");
    change(&mut draft);
    let path = draft.write(place.path());
    let error = load(&path).map(drop).unwrap_err();
    assert!(matches!(error, Error::Gguf { .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.starts_with(path.to_str().unwrap()), "{said}");
    for words in expected {
        assert!(said.contains(words), "{words}: {said}");
    }
    for foreign in ["config.json", "num_", "model.layers", "tokenizer.json:"] {
        assert!(!said.contains(foreign), "{foreign}: {said}");
    }
}

#[test]
fn tensors_that_lie_apart_may_lie_in_any_order() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama");
    draft.set("general.alignment", whole(32));
    // The first tensor moves after all others.
    let (name, length) = (draft.tensors[0].0.clone(), draft.tensors[0].3.len());
    let all = draft.tensors.iter().map(|t| t.3.len().next_multiple_of(32)).sum::<usize>();
    let bytes = draft.tensors[0].3.clone();
    draft.places.insert(name.clone(), all as u64);
    draft.tensors.push(("copy".to_owned(), vec![length / 4], 0, bytes));
    draft.places.insert("copy".to_owned(), 0);
    let moved = load(&draft.write(place.path())).unwrap();
    draft.places.clear();
    draft.tensors.pop();
    let plain = load(&draft.write(place.path())).unwrap();
    assert_eq!(moved.model.identity(), plain.model.identity());
}

/// A copy of a golden model, with a tokenizer.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(folder("llama").join(name), dir.path().join(name)).unwrap();
    }
    let words =
        r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","unk_token":"?","vocab":{"?":0}}}"#;
    fs::write(dir.path().join("tokenizer.json"), words).unwrap();
    dir
}

/// Changes a field of a JSON file.
fn edit(path: &Path, field: &str, value: Value) {
    let mut json: Value =
        fs::read(path).map_or_else(|_| json!({}), |text| serde_json::from_slice(&text).unwrap());
    json[field] = value;
    fs::write(path, json.to_string()).unwrap();
}

/// Replaces a string in the header of a safetensors file with another of the same length.
fn rename(path: &Path, from: &str, to: &str) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
    bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    fs::write(path, bytes).unwrap();
}

/// Returns the error for a directory, without its path and the slash after it.
fn refused(dir: &Path) -> String {
    let error = load(dir).map(drop).unwrap_err().to_string();
    let place = format!("{}/", dir.display());
    assert!(error.starts_with(&place), "{error}");
    error[place.len()..].to_owned()
}

#[rstest]
#[case::not_json(|d: &Path| fs::write(d.join("config.json"), "[").unwrap(), "config.json: EOF")]
#[case::no_layer(|d: &Path| edit(&d.join("config.json"), "num_hidden_layers", json!(0)), "config.json: num_hidden_layers is 0")]
#[case::quantised(
    |d: &Path| edit(&d.join("config.json"), "quantization_config", json!({ "quant_method": "gptq", "bits": 4 })),
    "config.json: quantization_config has quant_method \"gptq\": such weights are not supported (supported: f32, f16 and \
     bf16 in safetensors, and the blocks of GGUF files); use the model without quantisation, or as a GGUF file"
)]
#[case::generation(
    |d: &Path| edit(&d.join("generation_config.json"), "eos_token_id", json!("end")),
    "generation_config.json: eos_token_id \"end\" is not a token ID"
)]
#[case::tokenizer(|d: &Path| fs::write(d.join("tokenizer.json"), "{}").unwrap(), "tokenizer.json: ")]
#[case::tokenizer_config(
    |d: &Path| fs::write(d.join("tokenizer_config.json"), "[").unwrap(),
    "tokenizer_config.json: EOF"
)]
#[case::shape(
    |d: &Path| edit(&d.join("config.json"), "vocab_size", json!(47)),
    "model.safetensors: tensor \"model.embed_tokens.weight\" has shape [48, "
)]
#[case::missing(
    |d: &Path| rename(&d.join("model.safetensors"), "layers.1.mlp.up_proj.weight", "layers.7.mlp.up_proj.weight"),
    "model.safetensors: tensor \"model.layers.1.mlp.up_proj.weight\" is missing"
)]
#[case::element_type(
    |d: &Path| rename(&d.join("model.safetensors"), "\"F32\"", "\"I32\""),
    "model.safetensors: tensor \"NAME\" has the unsupported element type I32 (supported: F32, F16 and BF16); convert the \
     model to a supported type, or use a GGUF file"
)]
#[case::header(
    |d: &Path| fs::write(d.join("model.safetensors"), "PK").unwrap(),
    "model.safetensors: not a valid safetensors file"
)]
#[case::index(
    |d: &Path| {
        fs::remove_file(d.join("model.safetensors")).unwrap();
        fs::write(d.join("model.safetensors.index.json"), "{}").unwrap();
    },
    "model.safetensors.index.json: no weight_map"
)]
#[case::missing_of_shards(|d: &Path| shard(d, "a.safetensors"), "model.safetensors.index.json: tensor \"")]
#[case::shape_in_a_shard(
    |d: &Path| { shard(d, "b.safetensors"); edit(&d.join("config.json"), "vocab_size", json!(47)); },
    "b.safetensors: tensor \"model.embed_tokens.weight\" has shape [48, "
)]
fn a_bad_file_of_a_directory_is_named(#[case] change: fn(&Path), #[case] expected: &str) {
    let dir = directory();
    change(dir.path());
    let said = refused(dir.path());
    let name = said.split('"').nth(1).unwrap_or_default();
    assert!(said.starts_with(&expected.replace("NAME", name)), "{said}");
}

/// Turns the weights into one shard. The index lists only the embeddings in it.
fn shard(dir: &Path, name: &str) {
    fs::rename(dir.join("model.safetensors"), dir.join(name)).unwrap();
    let index = json!({ "weight_map": { "model.embed_tokens.weight": name } });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    if name == "a.safetensors" {
        rename(&dir.join(name), "layers.1.mlp.up_proj.weight", "layers.7.mlp.up_proj.weight");
    }
}

#[test]
fn a_directory_without_weights_says_which_are_read() {
    let dir = directory();
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let error = load(dir.path()).map(drop).unwrap_err().to_string();
    let path = dir.path().display();
    assert!(error.starts_with(&format!("{path}: it has neither model.safetensors nor")), "{error}");
    assert!(
        error.ends_with("convert weights of another format, such as pytorch_model.bin, to safetensors"),
        "{error}"
    );
}

/// The error of a template that raises names the template's file, whichever file that is.
#[test]
fn a_template_that_raises_is_named_by_its_file() {
    const RAISES: &str = "a\n{{ raise_exception('no users') }}";
    let said = |path: &Path| {
        let codec = load(path).unwrap().codec;
        codec.conversation(&[Message::new(Role::User, "a")]).unwrap_err().to_string()
    };
    let expected =
        |place: String| format!("chat template of {place}: line 2: it rejects the conversation: no users");
    let dir = directory();
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    edit(&path("tokenizer_config.json"), "chat_template", json!(RAISES));
    assert_eq!(said(dir.path()), expected(path("tokenizer_config.json").display().to_string()));
    fs::write(path("chat_template.jinja"), RAISES).unwrap();
    assert_eq!(said(dir.path()), expected(path("chat_template.jinja").display().to_string()));
    let mut draft = converted("llama");
    draft.set("tokenizer.chat_template", text(RAISES));
    let place = tempfile::tempdir().unwrap();
    let file = draft.write(place.path());
    let of_field = expected(format!("{}, field \"tokenizer.chat_template\"", file.display()));
    assert_eq!(said(&file), of_field);
    fs::copy(path("tokenizer.json"), place.path().join("tokenizer.json")).unwrap();
    assert_eq!(said(&file), of_field, "also next to a tokenizer of its own");
    fs::write(place.path().join("tokenizer.json"), "{}").unwrap();
    let error = load(&file).map(drop).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}/tokenizer.json: ", place.path().display())), "{error}");
}

/// Pipes, devices, folders, huge files and links without a file in place of each small file are errors that name
/// the path. None of them waits, fills memory or counts as absent.
#[test]
#[cfg(unix)]
fn what_is_no_regular_file_is_named() {
    use std::os::unix::fs::symlink;
    type Put = fn(&Path);
    let small = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ];
    let puts: [(&str, Put); 5] = [
        ("a pipe", |path| {
            assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("a device without end", |path| symlink("/dev/zero", path).unwrap()),
        ("a folder", |path| fs::create_dir(path).unwrap()),
        ("a link without its file", |path| symlink("blobs/none", path).unwrap()),
        ("a huge file", |path| fs::File::create(path).unwrap().set_len(1 << 40).unwrap()),
    ];
    for name in small {
        for (what, put) in puts {
            let dir = directory();
            let path = dir.path().join(name);
            if path.exists() {
                fs::remove_file(&path).unwrap();
            }
            put(&path);
            let error = load(dir.path()).map(drop).expect_err(what).to_string();
            assert!(error.contains(name), "{what} as {name}: {error}");
        }
    }
}

/// Names what is no regular file in place of a model: a GGUF file, the weights of a directory, and one of its shards.
#[test]
#[cfg(unix)]
fn a_model_that_is_no_regular_file_is_named() {
    use std::os::unix::{fs::symlink, net::UnixListener};
    type Put = fn(&Path);
    let puts: [(&str, Put); 5] = [
        ("a named pipe", |path| {
            assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("a socket", |path| drop(UnixListener::bind(path).unwrap())),
        ("a device", |path| symlink("/dev/zero", path).unwrap()),
        ("a link to a file that does not exist", |path| symlink("blobs/none", path).unwrap()),
        ("a directory", |path| fs::create_dir(path).unwrap()),
    ];
    for (what, put) in puts {
        let dir = directory();
        let weights = dir.path().join("model.safetensors");
        fs::remove_file(&weights).unwrap();
        put(&weights);
        let shards = directory();
        fs::remove_file(shards.path().join("model.safetensors")).unwrap();
        let index = r#"{"weight_map": {"model.norm.weight": "part.safetensors"}}"#;
        fs::write(shards.path().join("model.safetensors.index.json"), index).unwrap();
        put(&shards.path().join("part.safetensors"));
        let model = dir.path().join("model.gguf");
        put(&model);
        for (path, name) in
            [(dir.path(), "model.safetensors"), (shards.path(), "part.safetensors"), (&model, "model.gguf")]
        {
            let error = load(path).map(drop).expect_err(what).to_string();
            assert!(error.contains(name) && error.contains(what), "{what} as {name}: {error}");
        }
    }
    let none = tempfile::tempdir().unwrap();
    let error = load(none.path()).map(drop).unwrap_err().to_string();
    assert!(error.contains("a directory without config.json"), "{error}");
    let error = load(&none.path().join("none.gguf")).map(drop).unwrap_err().to_string();
    assert!(error.contains("none.gguf") && error.contains("No such file"), "{error}");
}
