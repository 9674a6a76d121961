//! GGUF files: the same models as in their directories, tokenizers from fields, and files with false
//! contents.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvmodel::dense::{StoredType, StoredWeight};
use kvmodel::{Error, Message, Model, ModelConfig, ModelDirectory, Role, WeightFormat, Weights};
use rstest::rstest;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::folder;
use crate::greedy::answer;

/// A value in a file: its type, and its bytes.
pub(crate) type Field = (u32, Vec<u8>);

pub(crate) fn text(text: &str) -> Field {
    (8, counted(text))
}

pub(crate) fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

pub(crate) fn whole(n: u32) -> Field {
    (4, n.to_le_bytes().to_vec())
}

pub(crate) fn real(x: f32) -> Field {
    (6, x.to_le_bytes().to_vec())
}

pub(crate) fn list(kind: u32, elements: impl IntoIterator<Item = Vec<u8>>) -> Field {
    let elements: Vec<Vec<u8>> = elements.into_iter().collect();
    (
        9,
        [kind.to_le_bytes().to_vec(), (elements.len() as u64).to_le_bytes().to_vec(), elements.concat()]
            .concat(),
    )
}

/// A file before it is written.
#[derive(Clone, Default)]
pub(crate) struct Draft {
    pub(crate) fields: BTreeMap<String, Field>,
    /// The name, shape (outermost axis first), ggml's element type, and bytes of each tensor.
    pub(crate) tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
    /// The offsets of tensors that do not directly follow the one before.
    pub(crate) places: BTreeMap<String, u64>,
}

impl Draft {
    pub(crate) fn set(&mut self, name: &str, field: Field) {
        self.fields.insert(name.to_owned(), field);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut head = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.fields.len() as u64).to_le_bytes());
        for (name, (kind, bytes)) in &self.fields {
            head.extend([counted(name), kind.to_le_bytes().to_vec(), bytes.clone()].concat());
        }
        let mut data = Vec::new();
        for (name, shape, dtype, bytes) in &self.tensors {
            head.extend(counted(name));
            head.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&extent| head.extend((extent as u64).to_le_bytes()));
            head.extend(dtype.to_le_bytes());
            head.extend(self.places.get(name).copied().unwrap_or(data.len() as u64).to_le_bytes());
            data.extend_from_slice(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        head.resize(head.len().next_multiple_of(32), 0);
        head.extend(data);
        head
    }

    pub(crate) fn write(&self, at: &Path) -> PathBuf {
        let path = at.join("model.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut (String, Vec<usize>, u32, Vec<u8>) {
        self.tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
    }
}

/// Returns the 256 bytes as GPT-2 writes them in vocabularies.
pub(crate) fn byte_tokens() -> Vec<String> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256u32..;
    let of = |b: u8| if printable(&b) { u32::from(b) } else { others.next().unwrap() };
    (0..=255).map(of).map(|code| char::from_u32(code).unwrap().to_string()).collect()
}

/// Adds a tokenizer with one token per byte, four merges and an end token.
fn add_tokenizer(draft: &mut Draft, vocabulary: usize) {
    let mut tokens = byte_tokens();
    tokens.extend(["he", "ll", "hell", "12", "<end>"].map(str::to_owned));
    tokens.truncate(vocabulary);
    let kinds = tokens.iter().map(|token| if token == "<end>" { 3i32 } else { 1 });
    draft.set("tokenizer.ggml.model", text("gpt2"));
    draft.set("tokenizer.ggml.pre", text("smollm"));
    draft.set("tokenizer.ggml.token_type", list(5, kinds.map(|kind| kind.to_le_bytes().to_vec())));
    draft.set("tokenizer.ggml.tokens", list(8, tokens.iter().map(|token| counted(token))));
    let merges = ["h e", "l l", "he ll", "1 2"].into_iter().filter(|_| vocabulary > 256);
    draft.set("tokenizer.ggml.merges", list(8, merges.map(counted)));
    draft.set("tokenizer.chat_template", text("{% for m in messages %}[{{ m.content }}]{% endfor %}"));
}

/// Reorders the rows of each head as llama.cpp does: rows `i` and `i + dim / 2` are adjacent.
fn interleaved(bytes: &[u8], heads: usize, dim: usize) -> Vec<u8> {
    let head = bytes.len() / heads;
    let row = head / dim;
    let of = |at: usize| {
        let (head_at, i) = (at / dim * head, at % dim);
        let from = head_at + (i % 2 * dim / 2 + i / 2) * row;
        &bytes[from..from + row]
    };
    (0..heads * dim).flat_map(|at| of(at).to_vec()).collect()
}

/// Returns a golden model as it would be in a file.
pub(crate) fn converted(name: &str) -> Draft {
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder(name).join("config.json")).unwrap()).unwrap();
    let number = |field: &str| config[field].as_u64().unwrap() as u32;
    let architecture = config["model_type"].as_str().unwrap().trim_end_matches("_text");
    let gemma = architecture == "gemma3";
    let mut draft = Draft::default();
    draft.set("general.architecture", text(architecture));
    for (field, from) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
    ] {
        draft.set(&format!("{architecture}.{field}"), whole(number(from)));
    }
    let mut rope = &config["rope_parameters"];
    let mut set = |field: &str, value: Field| draft.set(&format!("{architecture}.{field}"), value);
    if gemma {
        set("attention.sliding_window", whole(number("sliding_window")));
        set("rope.freq_base_swa", real(rope["sliding_attention"]["rope_theta"].as_f64().unwrap() as f32));
        rope = &rope["full_attention"];
        set("rope.scaling.type", text("linear"));
        set("rope.scaling.factor", real(rope["factor"].as_f64().unwrap() as f32));
    }
    let theta = rope["rope_theta"].as_f64().or(config["rope_theta"].as_f64()).unwrap();
    set("rope.freq_base", real(theta as f32));
    let eps = config["rms_norm_eps"].as_f64().unwrap() as f32;
    draft.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), real(eps));
    if let Some(dim) = config["head_dim"].as_u64() {
        draft.set(&format!("{architecture}.attention.key_length"), whole(dim as u32));
    }
    add_tokenizer(&mut draft, number("vocab_size") as usize);
    let file = std::fs::read(folder(name).join("model.safetensors")).unwrap();
    for (tensor, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
        let (mut short, mut bytes) = (tensor.clone(), view.data().to_vec());
        for (from, to) in [
            ("model.layers.", "blk."),
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", if gemma { "post_attention_norm" } else { "ffn_norm" }),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ] {
            short = short.replace(from, to);
        }
        if gemma && tensor.ends_with("norm.weight") {
            let factors = bytes.chunks_exact(4).map(|b| 1.0 + f32::from_le_bytes(b.try_into().unwrap()));
            bytes = factors.flat_map(f32::to_le_bytes).collect();
        }
        if architecture == "llama" && short.contains(".attn_q.") {
            bytes = interleaved(&bytes, number("num_attention_heads") as usize, number("head_dim") as usize);
        } else if architecture == "llama" && short.contains(".attn_k.") {
            bytes = interleaved(&bytes, number("num_key_value_heads") as usize, number("head_dim") as usize);
        }
        draft.tensors.push((short, view.shape().to_vec(), 0, bytes));
    }
    draft
}

fn logits(model: &Model) -> Vec<Vec<f32>> {
    let prompt: Vec<u32> = (0..40).map(|i| i * 97 % 48).collect();
    answer(model, &prompt, 5)
}

pub(crate) fn load(path: &Path) -> kvmodel::Result<ModelDirectory> {
    ModelDirectory::load(path, WeightFormat::Stored, &mut |_, _| ())
}

#[rstest]
fn a_file_is_the_model_of_its_directory(#[values("llama", "qwen2", "qwen3", "gemma3")] name: &str) {
    let place = tempfile::tempdir().unwrap();
    let path = converted(name).write(place.path());
    let config = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
    // A file has no field for the scale of Gemma's queries, which is that of the width of a head.
    let config = config.replace("\"query_pre_attn_scalar\": 24", "\"query_pre_attn_scalar\": 16");
    let config = ModelConfig::from_json(&config).unwrap();
    let weights = Weights::from_directory(&folder(name), &mut |_, _| ()).unwrap();
    let mut reports = Vec::new();
    let loaded =
        ModelDirectory::load(&path, WeightFormat::Stored, &mut |done, total| reports.push((done, total)))
            .unwrap();
    let expected = ModelConfig { eos: Vec::new(), shifted_norms: false, ..config.clone() };
    assert_eq!(ModelConfig { eos: Vec::new(), ..loaded.model.config().clone() }, expected);
    let directory = Model::new(config, weights, WeightFormat::Stored).unwrap();
    assert_eq!(logits(&loaded.model), logits(&directory));
    assert!(reports.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{reports:?}");
    assert!(reports.last().is_some_and(|&(done, total)| done == total && total > 0), "{reports:?}");
}

/// Llama 3's scaling is stored as a list of divisors.
#[test]
fn divisors_of_frequencies_are_those_of_their_scaling() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama3");
    let text = std::fs::read_to_string(folder("llama3").join("config.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let scaling = &json["rope_parameters"];
    let at = |name: &str| scaling[name].as_f64().unwrap();
    let (factor, low, high) = (at("factor"), at("low_freq_factor"), at("high_freq_factor"));
    let (theta, original) = (at("rope_theta"), at("original_max_position_embeddings"));
    let divisors: Vec<u8> = (0..6)
        .map(|i| {
            let wavelength = std::f64::consts::TAU * theta.powf(f64::from(i) / 6.0);
            let share = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / ((1.0 - share) / factor + share)) as f32
        })
        .flat_map(f32::to_le_bytes)
        .collect();
    draft.tensors.push(("rope_freqs.weight".to_owned(), vec![6], 0, divisors));
    let loaded = load(&draft.write(place.path())).unwrap();
    let weights = Weights::from_directory(&folder("llama3"), &mut |_, _| ()).unwrap();
    let directory =
        Model::new(ModelConfig::from_json(&text).unwrap(), weights, WeightFormat::Stored).unwrap();
    for (a, b) in logits(&loaded.model).iter().flatten().zip(logits(&directory).iter().flatten()) {
        assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{a} and {b}");
    }
}

#[test]
fn the_tokenizer_cuts_merges_and_frames_as_its_fields_say() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama");
    // The golden's vocabulary is too small for a byte tokenizer.
    let hidden = draft.tensor("token_embd.weight").1[1];
    *draft.tensor("token_embd.weight") =
        ("token_embd.weight".to_owned(), vec![261, hidden], 0, vec![0; 261 * hidden * 4]);
    draft.tensors.retain(|tensor| tensor.0 != "output.weight");
    add_tokenizer(&mut draft, 261);
    draft.set("tokenizer.ggml.eos_token_id", whole(260));
    let loaded = load(&draft.write(place.path())).unwrap();
    let codec = &loaded.codec;
    // "hell" is one token, a digit is never merged, and a special token is whole.
    let tokens = codec.encode("hello 12<end>", true).unwrap();
    let space = byte_tokens().iter().position(|token| token == "Ġ").unwrap() as u32;
    assert_eq!(tokens, [258, u32::from(b'o'), space, u32::from(b'1'), u32::from(b'2'), 260]);
    assert_eq!(codec.decode(&tokens).unwrap(), "hello 12");
    assert_eq!(loaded.model.config().eos, [260]);
    let chat = codec.conversation(&[Message::new(Role::User, "hell")]).unwrap();
    assert_eq!(chat, [u32::from(b'['), 258, u32::from(b']')]);
    // A begin token, words that are tokens, and a tokenizer.json that replaces the file's whole
    // tokenizer.
    draft.set("tokenizer.ggml.bos_token_id", whole(260));
    draft.set("tokenizer.ggml.pre", text("llama-bpe"));
    let codec = load(&draft.write(place.path())).unwrap().codec;
    assert_eq!(codec.encode("12hell", true).unwrap(), [260, 259, 258]);
    assert_eq!(codec.encode("12hell", false).unwrap(), [259, 258]);
    let own = r#"{"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},
        "model":{"type":"WordLevel","unk_token":"?","vocab":{"?":0,"hell":1}}}"#;
    std::fs::write(place.path().join("tokenizer.json"), own).unwrap();
    draft.set("tokenizer.ggml.model", text("llama"));
    let codec = load(&draft.write(place.path())).unwrap().codec;
    assert_eq!(codec.encode("hell ho", false).unwrap(), [1, 0]);
}

/// Adds a tokenizer that merges by score: bytes, some pieces, and a run of spaces that a user has added.
fn add_scored_tokenizer(draft: &mut Draft) {
    let mut tokens: Vec<(String, i32, f32)> = (0..=255).map(|b| (format!("<0x{b:02X}>"), 6, 0.0)).collect();
    tokens
        .extend([("<unk>", 2), ("<bos>", 3), ("  ", 4)].map(|(text, kind)| (text.to_owned(), kind, -1000.0)));
    let pieces = ["▁h", "he", "ll", "ell", "hell", "lo", "▁", "h", "e", "l", "o"];
    tokens.extend((1u8..).zip(pieces).map(|(rank, text)| (text.to_owned(), 1, -f32::from(rank))));
    let hidden = draft.tensor("token_embd.weight").1[1];
    *draft.tensor("token_embd.weight") =
        ("token_embd.weight".to_owned(), vec![tokens.len(), hidden], 0, vec![0; tokens.len() * hidden * 4]);
    draft.tensors.retain(|tensor| tensor.0 != "output.weight");
    draft.set("tokenizer.ggml.model", text("llama"));
    draft.set("tokenizer.ggml.pre", text("default"));
    draft.set("tokenizer.ggml.tokens", list(8, tokens.iter().map(|token| counted(&token.0))));
    draft
        .set("tokenizer.ggml.token_type", list(5, tokens.iter().map(|token| token.1.to_le_bytes().to_vec())));
    draft.set("tokenizer.ggml.scores", list(6, tokens.iter().map(|token| token.2.to_le_bytes().to_vec())));
    draft.set("tokenizer.ggml.unknown_token_id", whole(256));
    draft.set("tokenizer.ggml.bos_token_id", whole(257));
    draft.set("tokenizer.ggml.add_space_prefix", (7, vec![0]));
}

#[test]
fn a_tokenizer_with_scores_merges_the_highest_first() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama");
    add_scored_tokenizer(&mut draft);
    let codec = load(&draft.write(place.path())).unwrap().codec;
    let id = |text: &str| codec.encode(text, false).unwrap();
    // In " hello", "▁h" has the highest score, so "he" and "hell" cannot form.
    let (h, ell, o) = (259, 262, 269);
    assert_eq!(codec.encode(" hello", true).unwrap(), [257, h, ell, o]);
    assert_eq!(id("hello"), [263, o]);
    // Spaces that a user has added are cut out first, and characters without a token become bytes.
    assert_eq!(id("o  é"), [o, 258, 0xC3, 0xA9]);
    for text in ["hello", " hello  é, 12\n", "h he"] {
        assert_eq!(codec.decode(&id(text)).unwrap(), text);
    }
    let refused = |change: &dyn Fn(&mut Draft)| {
        let mut draft = draft.clone();
        change(&mut draft);
        load(&draft.write(place.path())).map(drop).unwrap_err().to_string()
    };
    let few = refused(&|draft| draft.set("tokenizer.ggml.scores", list(6, [])));
    assert!(few.contains("\"tokenizer.ggml.scores\" has 0 entries for 270 tokens"), "{few}");
    // A space in front of a text belongs to its first token, and is no part of the text.
    draft.set("tokenizer.ggml.add_space_prefix", (7, vec![1]));
    let codec = load(&draft.write(place.path())).unwrap().codec;
    assert_eq!(codec.encode("hello", false).unwrap(), [h, ell, o]);
    for text in ["hello", " hello é, 12\n", "h he"] {
        assert_eq!(codec.decode(&codec.encode(text, false).unwrap()).unwrap(), text);
    }
}

/// Files of Gemma 3 with settings that are not supported, each with its error message.
#[test]
fn files_of_gemma_3_are_refused_by_field() {
    let place = tempfile::tempdir().unwrap();
    let good = converted("gemma3");
    let with = |change: &dyn Fn(&mut Draft)| {
        let mut draft = good.clone();
        change(&mut draft);
        load(&draft.write(place.path())).map(drop).unwrap_err().to_string()
    };
    for (expected, said) in [
        (
            "gemma3.final_logit_softcapping 30.0",
            with(&|d| d.set("gemma3.final_logit_softcapping", real(30.0))),
        ),
        ("gemma3.attention.sliding_window_pattern 0", {
            with(&|d| d.set("gemma3.attention.sliding_window_pattern", whole(0)))
        }),
        ("\"gemma3.attention.sliding_window\" is missing", {
            with(&|d| drop(d.fields.remove("gemma3.attention.sliding_window")))
        }),
        ("\"blk.6.post_ffw_norm.weight\"", {
            with(&|d| d.tensors.retain(|t| t.0 != "blk.6.post_ffw_norm.weight"))
        }),
        ("\"blk.0.post_attention_norm.weight\"", {
            with(&|d| d.tensors.retain(|t| t.0 != "blk.0.post_attention_norm.weight"))
        }),
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

/// Files with false contents, each with its error message.
#[test]
fn files_that_lie_are_errors_that_name_the_place() {
    let place = tempfile::tempdir().unwrap();
    let good = converted("llama");
    let refused = |draft: &Draft| {
        let path = draft.write(place.path());
        let error = load(&path).map(drop).unwrap_err();
        assert!(error.to_string().contains("model.gguf"), "{error}");
        error.to_string()
    };
    let with = |change: &dyn Fn(&mut Draft)| {
        let mut draft = good.clone();
        change(&mut draft);
        refused(&draft)
    };
    let cases: [(&str, String); 15] = [
        ("architecture \"bert\" is not supported", with(&|d| d.set("general.architecture", text("bert")))),
        ("\"general.architecture\" is not a string", with(&|d| d.set("general.architecture", whole(1)))),
        ("\"llama.block_count\" is missing", with(&|d| drop(d.fields.remove("llama.block_count")))),
        ("8 experts", with(&|d| d.set("llama.expert_count", whole(8)))),
        ("4 of 8 elements of a head", with(&|d| d.set("llama.rope.dimension_count", whole(4)))),
        ("\"llama.rope.scaling.type\" is \"odd\"", with(&|d| d.set("llama.rope.scaling.type", text("odd")))),
        ("\"tokenizer.ggml.pre\" is \"odd\"", with(&|d| d.set("tokenizer.ggml.pre", text("odd")))),
        ("\"tokenizer.ggml.scores\" is missing", with(&|d| d.set("tokenizer.ggml.model", text("llama")))),
        ("\"tokenizer.ggml.token_type\" has", with(&|d| d.set("tokenizer.ggml.token_type", list(5, [])))),
        ("has 3 tokens, but", {
            with(&|d| {
                d.set("tokenizer.ggml.tokens", list(8, ["a", "b", "c"].map(counted)));
                d.set(
                    "tokenizer.ggml.token_type",
                    list(5, [1i32; 3].map(|kind| kind.to_le_bytes().to_vec())),
                );
                let width = d.tensor("token_embd.weight").1[1];
                d.tensor("token_embd.weight").1 = vec![2, width];
            })
        }),
        ("are duplicates", {
            with(&|d| {
                d.set("tokenizer.ggml.tokens", list(8, ["a", "a"].map(counted)));
                d.set(
                    "tokenizer.ggml.token_type",
                    list(5, [1i32; 2].map(|kind| kind.to_le_bytes().to_vec())),
                );
            })
        }),
        ("element type 99 (supported: f32, f16", with(&|d| d.tensor("blk.0.ffn_up.weight").2 = 99)),
        ("extends past the end of the file", with(&|d| d.tensor("output_norm.weight").1 = vec![1 << 40])),
        ("one part of a model", with(&|d| d.set("split.count", whole(2)))),
        ("\"token_embd.weight\" is missing", with(&|d| d.tensors.retain(|t| t.0 != "token_embd.weight"))),
    ];
    for (expected, said) in cases {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // Files that are cut off anywhere, and files whose counts are too large.
    let bytes = good.bytes();
    let path = place.path().join("model.gguf");
    let header = bytes.len() - good.tensors.iter().map(|t| t.3.len().next_multiple_of(32)).sum::<usize>();
    for end in (0..header).step_by(97).chain([header - 1, header, bytes.len() - 64]) {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert!(matches!(load(&path), Err(Error::Gguf { .. })), "{end} of {} bytes", bytes.len());
    }
    for at in [8, 16, 24] {
        let mut lying = bytes.clone();
        lying[at..at + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        std::fs::write(&path, lying).unwrap();
        assert!(matches!(load(&path), Err(Error::Gguf { .. })), "a count at {at}");
    }
    std::fs::write(&path, b"PK\x03\x04 something else").unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("does not begin with GGUF"));
}

/// Compares the elements with the ones that llama.cpp's Python package returns.
#[test]
fn blocks_have_the_elements_that_ggml_gives_them() {
    let json: Value = serde_json::from_str(include_str!("../goldens/ggml_blocks.json")).unwrap();
    let mut seen = 0;
    for dtype in StoredType::ALL.into_iter().filter(|dtype| dtype.is_blocks()) {
        let golden = &json["blocks"][dtype.to_string()];
        let shape: Vec<usize> =
            golden["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let hex = golden["bytes"].as_str().unwrap();
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
        let weight = StoredWeight::new("a", dtype, &shape, bytes).unwrap();
        let expected = golden["values"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32);
        for (i, (a, b)) in weight.to_f32().into_iter().zip(expected).enumerate() {
            assert!((a - b).abs() <= 1e-6 * b.abs().max(0.01), "{dtype}, element {i}: {a}, expected {b}");
        }
        seen += 1;
    }
    assert_eq!(seen, 11);
}
