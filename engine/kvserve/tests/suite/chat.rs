//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::client::{Client, post};
use crate::common::{DOCUMENTS, MODEL, SYSTEM, assert_nothing_is_held, server};

/// Returns a request about the documents as text.
fn question(more: Value) -> Value {
    let text = format!("{}\nalba ?", DOCUMENTS.join("\n"));
    let mut request = json!({
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
    });
    for (name, value) in more.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

#[test]
fn a_chat_is_answered_whole_and_streamed_with_the_same_text() {
    let server = server();
    let whole = post(server.address(), "/v1/chat/completions", &question(json!({})));
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    let choice = &whole["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty(), "{whole}");
    assert_eq!((&whole["object"], &choice["message"]["role"]), (&json!("chat.completion"), &json!("assistant")));
    assert!(["stop", "length"].contains(&choice["finish_reason"].as_str().unwrap()));

    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let mut client = Client::new(server.address());
    client.request("POST", "/v1/chat/completions", &[], question(options).to_string().as_bytes());
    let streamed = client.answer();
    assert_eq!(streamed.header("content-type"), Some("text/event-stream"));
    assert!(streamed.body.ends_with("data: [DONE]\n\n"), "{}", streamed.body);
    let events = streamed.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let pieces = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), text);
    let (usage, finish) = (events.last().unwrap(), &events[events.len() - 2]);
    assert_eq!(finish["choices"][0]["finish_reason"], choice["finish_reason"]);
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    // The whole answer came first, and left the prompt's whole blocks in the cache.
    let cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0 && cached.is_multiple_of(16), "{usage}");
    assert_eq!(finish["kv"]["reused"], cached);
    assert_nothing_is_held(&server);
}
