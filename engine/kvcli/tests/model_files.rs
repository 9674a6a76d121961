//! Small model files of the kinds that other engines answer wrongly or not at all: the program gives the right
//! value, or names what is wrong within a limit of memory and time.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::{Value, json};

use common::{json as kvc_json, kvc};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

/// A copy of the built-in model whose files a test changes.
struct Copy(tempfile::TempDir);

impl Copy {
    fn new() -> Self {
        let copy = Self(tempfile::tempdir().unwrap());
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
        for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            fs::copy(shipped.join(name), copy.path(name)).unwrap();
        }
        copy
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn arg(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn set(&self, name: &str, field: &str, value: Value) {
        let mut file: Value = serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap();
        file[field] = value;
        fs::write(self.path(name), file.to_string()).unwrap();
    }

    /// Changes the bytes of a tensor.
    fn set_tensor(&self, tensor: &str, byte: u8) {
        let mut file = fs::read(self.path("model.safetensors")).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let places: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
        let [start, end] = [0, 1].map(|i| places[tensor]["data_offsets"][i].as_u64().unwrap() as usize);
        file[8 + header + start..8 + header + end].fill(byte);
        fs::write(self.path("model.safetensors"), file).unwrap();
    }
}

/// Returns a tokenizer in which each byte is a token, with the ID of the byte plus one.
fn bytes() -> Value {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256u32..;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255u8 {
        let code = if printable(&byte) { u32::from(byte) } else { others.next().unwrap() };
        vocabulary.insert(char::from_u32(code).unwrap().to_string(), json!(u32::from(byte) + 1));
    }
    vocabulary.insert("<|end|>".to_owned(), json!(0));
    json!({
        "version": "1.0",
        "added_tokens": [{
            "id": 0, "content": "<|end|>", "special": true, "normalized": false, "single_word": false, "lstrip": false,
            "rstrip": false,
        }],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    })
}

#[rstest]
#[case::crlf(
    "{% for m in messages %}\r\n<|{{ m.role }}|>\r\n{{ m.content }}\r\n{% endfor %}\r\n",
    "<|user|>\nhello world\n"
)]
#[case::cr("{% for m in messages %}\r<|{{ m.role }}|>\r{{ m.content }}{% endfor %}", "<|user|>\nhello world")]
#[case::a_mapping_is_a_sequence("{% if messages[0] is sequence %}y{% else %}n{% endif %}", "y")]
#[case::none_is_not_iterable(
    "{% if tools is iterable and tools | length > 0 %}T{% endif %}{{ messages[0].content }}",
    "hello world"
)]
#[case::percent("{{ '%s: %s' % ('user', messages[0].content) }}", "user: hello world")]
#[case::counted_replacement("{{ messages[0].content | replace('l', 'L', 1) }}", "heLlo world")]
#[case::rsplit("{{ messages[0].content.rsplit(' ', 1)[-1] }}", "world")]
#[case::no_length(
    "{% if messages[0].tool_calls | length > 0 %}T{% endif %}{{ messages[0].content }}",
    "hello world"
)]
fn a_template_renders_as_in_jinja2(#[case] template: &str, #[case] expected: &str) {
    let copy = Copy::new();
    fs::write(copy.path("tokenizer.json"), bytes().to_string()).unwrap();
    copy.set("tokenizer_config.json", "chat_template", json!(template));
    fs::write(copy.path("chat.json"), r#"[{"role": "user", "content": "hello world"}]"#).unwrap();
    let read = kvc_json(&["--model", &copy.arg(""), "--messages", &copy.arg("chat.json"), "--answer", "1"]);
    let prompt = read["read_back"]["prompt"].as_array().unwrap();
    let prompt: Vec<u8> = prompt.iter().map(|id| (id.as_u64().unwrap() - 1) as u8).collect();
    assert_eq!(String::from_utf8(prompt).unwrap(), expected);
}

#[rstest]
fn a_tiny_temperature_answers_as_zero_does(#[values("1e-37", "1e-38", "1e-40")] temperature: &str) {
    let prompt = "alba is red . bora is blue . bora ?";
    let read = kvc_json(&["-p", prompt, "--temperature", temperature, "--max-new-tokens", "4"]);
    assert!(read["text"].as_str().unwrap().trim().starts_with("blue"), "{read}");
}

/// The answer is the token 794, `blue`, and the config's own end token 0.
#[rstest]
#[case::a_number(json!(794), &[])]
#[case::a_list_of_one(json!([794]), &[])]
#[case::the_last_of_a_list(json!([5, 6, 794]), &[])]
#[case::beside_the_own_one(json!([794, 0]), &[])]
#[case::other_tokens(json!([5, 6]), &[794])]
#[case::none(Value::Null, &[794])]
fn an_answer_ends_at_the_end_tokens_of_the_generation_config(#[case] ends: Value, #[case] tokens: &[u32]) {
    let copy = Copy::new();
    fs::write(copy.path("generation_config.json"), json!({ "eos_token_id": ends }).to_string()).unwrap();
    let prompt = "alba is red . bora is blue . bora ?";
    let read = kvc_json(&["--model", &copy.arg(""), "-p", prompt, "--max-new-tokens", "4"]);
    assert_eq!((&read["tokens"], &read["finish"]), (&json!(tokens), &json!("stop")));
}

#[test]
fn an_answer_that_outgrows_the_pool_keeps_what_it_has() {
    let copy = Copy::new();
    copy.set("config.json", "eos_token_id", Value::Null);
    let model = copy.arg("");
    let read = kvc_json(&["--model", &model, "-p", "alba ?", "--max-new-tokens", "1900", "--kv-memory", "1"]);
    let tokens = read["tokens"].as_array().unwrap().len();
    assert!((100..1500).contains(&tokens) && read["finish"] == "length", "{tokens}: {}", read["finish"]);
}

#[test]
fn of_both_names_of_a_scaling_the_old_one_counts() {
    let copy = Copy::new();
    let prompt = "alba is red . bora is blue . cedo is green . bora ?";
    let answer = || {
        let model = copy.arg("");
        kvc_json(&["--model", &model, "-p", prompt, "--max-new-tokens", "1", "--logprobs", "2"])["logprobs"]
            .clone()
    };
    let none = answer();
    copy.set("config.json", "rope_scaling", json!({ "rope_type": "linear", "factor": 16.0 }));
    let linear = answer();
    assert_ne!(linear, none, "the prompt shows the scaling");
    copy.set("config.json", "rope_parameters", json!({ "rope_type": "default", "rope_theta": 10000.0 }));
    assert_eq!(answer(), linear);
}

/// Runs the program with at most 4 GiB of addresses. Returns its output if it ends in time.
fn limited(args: &[&str]) -> Output {
    let begun = Instant::now();
    let mut child = Command::new("sh")
        .args(["-c", "ulimit -v 4194304; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kvc")])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("no end: {args:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

type Change = fn(&Copy);

#[rstest]
#[case::a_template_in_itself(
    |copy: &Copy| copy.set("tokenizer_config.json", "chat_template", json!("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}")),
    &["--chat"],
    "chat template of "
)]
#[case::loops(
    |copy: &Copy| copy.set("tokenizer_config.json", "chat_template",
        json!("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")),
    &["--chat"],
    "chat template of "
)]
#[case::doubling(
    |copy: &Copy| copy.set("tokenizer_config.json", "chat_template",
        json!("{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}")),
    &["--chat"],
    "chat template of "
)]
#[case::a_wide_number(
    |copy: &Copy| copy.set("tokenizer_config.json", "chat_template", json!("{{ '%4000000000d' | format(1) }}")),
    &["--chat"],
    "chat template of "
)]
#[case::a_tokenizer_that_is_cut_off(
    |copy: &Copy| {
        let text = fs::read(copy.path("tokenizer.json")).unwrap();
        fs::write(copy.path("tokenizer.json"), &text[..800]).unwrap();
    },
    &[],
    "tokenizer.json: "
)]
#[case::a_processor_without_its_token(
    |copy: &Copy| copy.set("tokenizer.json", "post_processor", json!({
        "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }], "special_tokens": {},
    })),
    &[],
    "tokenizer: "
)]
#[case::a_negative_epsilon(|copy: &Copy| copy.set("config.json", "rms_norm_eps", json!(-1.0)), &[], "rms_norm_eps")]
#[case::a_factor_without_a_type(
    |copy: &Copy| copy.set("config.json", "rope_scaling", json!({ "factor": 4.0 })),
    &[],
    "rope_type"
)]
#[case::weights_that_are_no_numbers(|copy: &Copy| copy.set_tensor("model.norm.weight", 0xff), &[], "not numbers")]
#[case::no_finite_weight_in_a_layer(
    |copy: &Copy| copy.set_tensor("model.layers.1.self_attn.v_proj.weight", 0xff),
    &[],
    "not numbers"
)]
fn a_bad_file_is_named(#[case] change: Change, #[case] args: &[&str], #[case] expected: &str) {
    let copy = Copy::new();
    change(&copy);
    let model = copy.arg("");
    let output =
        limited(&[&["run", "--json", "--model", &model, "-p", "hi", "--max-new-tokens", "3"], args].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(expected) && !said.contains("panicked"), "{said}");
}

/// A prompt of 11 MiB is named by the model's limit. Tokenising it would take over 2 GiB.
#[rstest]
#[case::a_plain_prompt(&[])]
#[case::a_document(&["--system", "you answer .", "--document"])]
#[case::a_conversation(&["--messages"])]
fn a_text_that_is_too_long_takes_no_memory(#[case] way: &[&str]) {
    let copy = Copy::new();
    let text = "alba is red . bora is blue .\n".repeat((11 << 20) / 29);
    let path = copy.arg("long.txt");
    if way == ["--messages"] {
        fs::write(&path, json!([{ "role": "user", "content": text }]).to_string()).unwrap();
    } else {
        fs::write(&path, text).unwrap();
    }
    let short = ["-p", "bora ?"];
    let args: Vec<&str> = match way {
        [] => vec!["--prompt-file", &path],
        ["--messages"] => vec!["--messages", &path],
        _ => [way, &[&path], &short].concat(),
    };
    let kvc = env!("CARGO_BIN_EXE_kvc");
    let limited = Command::new("sh")
        .args(["-c", "ulimit -v 1048576; exec \"$0\" run --json \"$@\"", kvc])
        .args(&args)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&limited.stderr);
    assert_eq!(limited.status.code(), Some(1), "{said}");
    assert!(
        said.contains("tokens, but the model supports at most 2048 positions"),
        "within 1 GiB of addresses: {said}"
    );
}

#[test]
fn a_precision_without_effect_is_noted() {
    let run = |more: &[&str]| {
        let output = kvc(&[&["run", "--compute", "int8", "-p", "bora is"], more].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&[]).contains("note: eight-bit products need weights in ggml blocks"));
    let blocks = run(&["--weights", "q8"]);
    assert!(!blocks.contains("need weights"), "{blocks}");
}
