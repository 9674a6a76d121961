//! Servers over the built-in model with another chat template, which writes tools.

use kvbackend_cpu::CpuBackend;
use kvengine::Engine;
use kvmodel::TextCodec;
use kvserve::{ServedModel, Server};
use serde_json::{Value, json};

use crate::common::{MODEL, add, free_port, loaded, small};

/// A template that shows calls between tags.
pub(crate) const TAGGED: &str = include_str!("../tools_template.jinja");

/// A template that shows no form of calls, so that they are JSON.
pub(crate) const PLAIN: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %} {{ message['content'] }}{% endfor %}";

/// A token of the server's tokenizer whose text is a whole call of the tool `wait`.
pub(crate) const CALL_TOKEN: usize = 1036;

/// The text of that token.
const CALL: &str = r#"<tool_call>{"name":"wait","arguments":{"a":1}}</tool_call>"#;

const TOKENIZER: &str = include_str!("../../../../models/tiny-rag/tokenizer.json");

/// Starts a server whose model has a chat template.
pub(crate) fn with_template(template: &str) -> Server {
    let mut tokenizer: Value = serde_json::from_str(TOKENIZER).unwrap();
    let model = &mut tokenizer["model"];
    let words = model["vocab"].as_object_mut().unwrap();
    let last = words.iter().find(|(_, id)| **id == CALL_TOKEN).map(|(word, _)| word.clone()).unwrap();
    words.remove(&last);
    words.insert(CALL.to_owned(), json!(CALL_TOKEN));
    // The last word came from the last rule.
    model["merges"].as_array_mut().unwrap().pop();
    let config = json!({"eos_token": "<|end|>", "chat_template": template}).to_string();
    let codec = TextCodec::from_bytes(tokenizer.to_string().as_bytes(), Some(config.as_bytes())).unwrap();
    let engine = Engine::new(loaded().model, CpuBackend::new(), codec.digest(), &small()).unwrap();
    let model = ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: None };
    Server::start(model, free_port()).unwrap()
}

/// A schema of an object with a colour and a small number.
pub(crate) fn paint() -> Value {
    json!({
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["colour", "coats"],
        "additionalProperties": false,
    })
}

/// Checks a value by this schema.
pub(crate) fn assert_paint(value: &Value) {
    assert_eq!(value.as_object().unwrap().len(), 2, "{value}");
    assert!(["red", "blue"].contains(&value["colour"].as_str().unwrap()), "{value}");
    assert!((1..=3).contains(&value["coats"].as_u64().unwrap()), "{value}");
}

/// Returns a request with other fields.
pub(crate) fn merged(mut request: Value, more: Value) -> Value {
    add(&mut request, more);
    request
}
