//! `/v1/messages` and `/v1/messages/count_tokens`.

use kvserve::{Limits, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{call, get, post};
use crate::common::{
    DOCUMENTS, MODEL, QUESTION, SYSTEM, assert_nothing_is_held, free_port, question, reusing, server, with,
};

const PATH: &str = "/v1/messages";

fn document(i: usize) -> Value {
    let source = json!({"type": "text", "media_type": "text/plain", "data": DOCUMENTS[i].1});
    json!({"type": "document", "source": source})
}

fn search_result(i: usize) -> Value {
    let content = json!([{"type": "text", "text": DOCUMENTS[i].1}]);
    json!({"type": "search_result", "source": "a", "title": "", "content": content, "citations": {"enabled": true}})
}

/// Returns a request with the content of the user's only message.
fn request(content: Value) -> Value {
    json!({
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 0,
        "top_k": 1,
        "system": SYSTEM,
        "messages": [{"role": "user", "content": content}],
    })
}

fn with_documents() -> Value {
    request(json!([document(0), document(1), document(2), {"type": "text", "text": QUESTION.0}]))
}

fn sources(answer: &Value) -> Vec<String> {
    let parts = answer["kv"]["parts"].as_array().unwrap_or_else(|| panic!("{answer}")).clone();
    parts.into_iter().map(|part| part["source"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_message_is_answered_whole_and_streamed_with_the_same_text() {
    let server = reusing();
    let whole = post(server.address(), PATH, &with_documents()).json();
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["model"]),
        (&json!("message"), &json!("assistant"), &json!(MODEL))
    );
    assert_eq!(whole["content"][0]["text"].as_str().unwrap().trim(), QUESTION.1);
    assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    let created = whole["usage"]["cache_creation_input_tokens"].as_u64().unwrap();
    assert!(created > 80 && whole["usage"]["cache_read_input_tokens"] == 0, "{whole}");

    let mut streamed = with_documents();
    streamed["stream"] = json!(true);
    let streamed = post(server.address(), PATH, &streamed);
    let names: Vec<&str> = streamed.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let events = streamed.events();
    assert_eq!(names, events.iter().map(|event| event["type"].as_str().unwrap()).collect::<Vec<_>>());
    assert_eq!(names[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, whole["content"][0]["text"]);
    let last = &events[events.len() - 2];
    assert_eq!(last["delta"]["stop_reason"], "end_turn");
    let usage = &last["usage"];
    assert_eq!(usage["output_tokens"], whole["usage"]["output_tokens"]);
    assert!(usage["cache_read_input_tokens"].as_u64().unwrap() >= created, "{last}");
    let sum = |usage: &Value| {
        let names = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"];
        names.iter().map(|name| usage[name].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(sum(usage), sum(&whole["usage"]));
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], sum(usage));
    assert_nothing_is_held(&server);
}

/// Tests every place where a document may stand.
#[rstest]
#[case::search_results(request(json!([search_result(2), search_result(0), search_result(1), {"type": "text", "text": QUESTION.0}])))]
#[case::after_the_question(request(json!([{"type": "text", "text": QUESTION.0}, document(1), document(0), document(2)])))]
#[case::content(request(json!([
    {"type": "document", "source": {"type": "content", "content": DOCUMENTS[0].1}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": DOCUMENTS[1].1}]}},
    document(2),
    {"type": "text", "text": QUESTION.0, "cache_control": {"type": "ephemeral"}},
])))]
fn a_document_is_found_wherever_it_stands(#[case] other: Value) {
    let server = reusing();
    assert_eq!(sources(&post(server.address(), PATH, &with_documents()).json()), ["computed"; 3]);
    let answer = post(server.address(), PATH, &other).json();
    assert_eq!(sources(&answer), ["cache"; 3], "{answer}");
    assert_eq!(answer["content"][0]["text"].as_str().unwrap().trim(), QUESTION.1);
}

#[test]
fn results_of_tools_are_documents_in_front_of_the_conversation() {
    let conversation = |results: Value| {
        let mut request = with_documents();
        request["messages"] = json!([
            {"role": "user", "content": QUESTION.0},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "a search may help", "signature": "a"},
                {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "alba"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": results}]},
        ]);
        request
    };
    let reusing = reusing();
    let first = post(reusing.address(), PATH, &conversation(json!([search_result(0), search_result(1)])));
    assert_eq!(first.status, 200, "{first:?}");
    assert_eq!(sources(&first.json()), ["computed"; 2]);
    let second =
        conversation(json!([search_result(1), search_result(0), {"type": "text", "text": "two results"}]));
    assert_eq!(sources(&post(reusing.address(), PATH, &second).json()), ["cache"; 2]);
    // The same documents in the user's first message are the same chunks.
    let direct = request(json!([document(0), document(1), {"type": "text", "text": QUESTION.0}]));
    assert_eq!(sources(&post(reusing.address(), PATH, &direct).json()), ["cache"; 2]);
    assert_nothing_is_held(&reusing);
    // Without reuse, results stay where they are, so that a conversation keeps its beginning.
    let plain = server();
    let answer = post(plain.address(), PATH, &second).json();
    assert_eq!(answer["kv"]["parts"], json!([]), "{answer}");
    let mut longer = second;
    longer["messages"].as_array_mut().unwrap().extend([
        json!({"role": "assistant", "content": "red"}),
        json!({"role": "user", "content": "bora ?"}),
    ]);
    let longer = post(plain.address(), PATH, &longer).json();
    assert!(
        longer["kv"]["reused"].as_u64().unwrap() + 16 >= answer["kv"]["computed"].as_u64().unwrap(),
        "{longer}"
    );
}

#[test]
fn an_answer_ends_at_a_stop_sequence_or_at_the_limit() {
    let server = server();
    let mut request = request(json!(format!("{}\n{}", DOCUMENTS[0].1, QUESTION.0)));
    request["stop_sequences"] = json!(["never", "ed"]);
    let answer = post(server.address(), PATH, &request).json();
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!("ed")));
    assert_eq!(answer["content"][0]["text"].as_str().unwrap().trim(), "r");
    let mut request = request.clone();
    request["stop_sequences"] = json!([]);
    request["max_tokens"] = json!(1);
    let cut = post(server.address(), PATH, &request).json();
    assert_eq!(
        (&cut["stop_reason"], &cut["usage"]["output_tokens"]),
        (&json!("max_tokens"), &json!(1)),
        "the answer has a token before its end: {cut}"
    );
    // Claude Code asks for more tokens than small models have.
    request["max_tokens"] = json!(32_000);
    assert_eq!(post(server.address(), PATH, &request).status, 200);
}

#[test]
fn tokens_are_counted_as_they_are_answered() {
    let server = reusing();
    let mut asked = with_documents();
    let usage = post(server.address(), PATH, &asked).json()["usage"].clone();
    let sum: u64 = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"]
        .iter()
        .map(|name| usage[name].as_u64().unwrap())
        .sum();
    asked.as_object_mut().unwrap().remove("max_tokens");
    let counted = post(server.address(), "/v1/messages/count_tokens", &asked).json();
    assert_eq!(counted, json!({"input_tokens": sum}));
}

#[test]
fn both_dialects_find_the_same_documents() {
    let server = reusing();
    assert_eq!(post(server.address(), "/v1/chat/completions", &question(json!({}))).status, 200);
    assert_eq!(sources(&post(server.address(), PATH, &with_documents()).json()), ["cache"; 3]);
}

#[rstest]
#[case::no_limit(json!({"max_tokens": null}), 400, "max_tokens is missing")]
#[case::zero(json!({"max_tokens": 0}), 400, "at least 1")]
#[case::negative(json!({"max_tokens": -5}), 400, "max_tokens: invalid value")]
#[case::hot(json!({"temperature": 1.5}), 400, "temperature is 1.5; it must be from 0 to 1")]
#[case::unknown(json!({"presence_penalty": 1}), 400, "unknown parameter: \"presence_penalty\"")]
#[case::model(json!({"model": "claude"}), 404, "model: the model \"claude\" does not exist")]
#[case::tools(json!({"tools": [{"name": "a"}]}), 400, "does not write tools")]
#[case::no_blocks(json!({"messages": [{"role": "user", "content": []}]}), 400, "messages[0].content: the content is empty")]
#[case::edits(json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}), 400, "context_management is not supported")]
#[case::thinking(json!({"thinking": 5}), 400, "thinking must be an object")]
#[case::config(json!({"output_config": 5}), 400, "output_config must be an object")]
#[case::role(json!({"messages": [{"role": "system", "content": "a"}]}), 400, "messages[0].role: the role must be user or assistant")]
#[case::content(json!({"messages": [{"role": "user", "content": 5}]}), 400, "messages[0].content: ")]
#[case::no_messages(json!({"messages": []}), 400, "messages is an empty list")]
#[case::messages(json!({"messages": "a"}), 400, "messages must be a list")]
#[case::image(json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), 400, "messages[0].content[0].type: ")]
#[case::pdf(json!({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}), 400, "send their text")]
#[case::empty(json!({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": " "}}]}]}), 400, "is empty")]
#[case::result(json!({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}), 400, "tool_use_id must be a string")]
#[case::call(json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}), 400, "the input must be an object")]
#[case::system(json!({"system": [{"type": "image"}]}), 400, "system[0].type: ")]
#[case::stop(json!({"stop_sequences": [""]}), 400, "stop_sequences has an empty string")]
fn a_wrong_request_is_refused_in_this_dialect(#[case] more: Value, #[case] status: u16, #[case] words: &str) {
    let server = server();
    let mut request = request(json!("alba ?"));
    for (name, value) in more.as_object().unwrap() {
        request[name] = value.clone();
    }
    let answer = post(server.address(), PATH, &request);
    assert_eq!(answer.status, status, "{answer:?}");
    let answer = answer.json();
    assert_eq!(answer["type"], "error");
    let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
    assert_eq!(answer["error"]["type"], kind);
    assert!(answer["error"]["message"].as_str().unwrap().contains(words), "{answer}");
    assert_nothing_is_held(&server);
}

#[test]
fn refusals_of_the_server_itself_have_the_form_of_this_dialect() {
    let mut keys = kvserve::ApiKeys::default();
    keys.add("key", "alice");
    let limits = Limits { body_bytes: 2000, ..Limits::default() };
    let server = with(None, ServerConfig { keys: Some(keys), limits, ..free_port() });
    let send = |headers: &[(&str, &str)], body: &[u8]| call(server.address(), "POST", PATH, headers, body);
    let named = call(server.address(), "POST", PATH, &[("x-request-id", "a-1")], b"{}");
    assert_eq!((named.header("request-id"), named.header("x-request-id")), (Some("a-1"), Some("a-1")));
    let kind = |answer: crate::client::Answer| {
        (answer.status, answer.json()["error"]["type"].as_str().unwrap().to_owned())
    };
    let body = request(json!("alba ?")).to_string();
    assert_eq!(kind(send(&[], body.as_bytes())), (401, "authentication_error".to_owned()));
    assert_eq!(send(&[("x-api-key", "key")], body.as_bytes()).status, 200);
    assert_eq!(kind(send(&[("x-api-key", "key")], &[b'a'; 3000])), (413, "request_too_large".to_owned()));
    assert_eq!(kind(send(&[("x-api-key", "key")], b"{")), (400, "invalid_request_error".to_owned()));
    assert_eq!(kind(get(server.address(), PATH)), (405, "invalid_request_error".to_owned()));
    assert_eq!(
        kind(post(server.address(), "/v1/messages/batches", &json!({}))),
        (404, "not_found_error".to_owned())
    );
}

#[test]
fn a_sleeping_server_is_overloaded_for_this_dialect() {
    let server = server();
    assert_eq!(call(server.address(), "POST", "/sleep", &[], b"").status, 200);
    let answer = post(server.address(), PATH, &request(json!("alba ?")));
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (529, &json!("overloaded_error")));
}

#[test]
fn messages_of_the_user_that_follow_each_other_are_one() {
    // Such a template refuses a conversation whose roles do not alternate.
    let server = crate::tooled::with_template(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %} {{ m.content }}{% endfor %}",
    );
    let asked = |messages: Value| {
        post(
            server.address(),
            PATH,
            &json!({"messages": messages, "max_tokens": 1, "context_management": {"edits": []}}),
        )
    };
    let user = |content: Value| json!({"role": "user", "content": content});
    let several =
        asked(json!([user(json!("alba is red .")), user(json!([{"type": "text", "text": "alba ?"}]))]));
    assert_eq!(several.status, 200, "{several:?}");
    let one = asked(json!([user(
        json!([{"type": "text", "text": "alba is red ."}, {"type": "text", "text": "alba ?"}])
    )]));
    assert_eq!(several.json()["usage"], one.json()["usage"]);
}

#[test]
fn a_tool_that_failed_says_so() {
    let server = server();
    let tokens = |is_error: Value| {
        let result =
            json!({"type": "tool_result", "tool_use_id": "a", "content": "no colour", "is_error": is_error});
        let call = json!({"type": "tool_use", "id": "a", "name": "b", "input": {}});
        let messages = json!([
            {"role": "user", "content": "alba ?"}, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]},
        ]);
        let answer = post(server.address(), PATH, &json!({"messages": messages, "max_tokens": 1})).json();
        let usage = &answer["usage"];
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(json!(false)), tokens(Value::Null));
    assert!(tokens(json!(true)) > tokens(json!(false)));
}
