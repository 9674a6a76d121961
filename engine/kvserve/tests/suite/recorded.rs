//! Requests of unmodified clients, as `proof/serve/check_clients.py` has recorded them.

use serde_json::Value;

use crate::client::{Answer, call};
use crate::common::{QUESTION, assert_nothing_is_held, reusing};
use crate::tooled::{TAGGED, assert_paint, with_template};

const RECORDED: &str = include_str!("../recorded.jsonl");

/// Returns all texts of an answer in any dialect, one after another.
fn texts(answer: &Answer) -> String {
    fn collect(value: &Value, all: &mut String) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| collect(item, all)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if ["text", "content", "delta"].contains(&name.as_str()) => {
                            *all += text;
                        }
                        _ => collect(value, all),
                    }
                }
            }
            _ => {}
        }
    }
    let mut all = String::new();
    let is_stream = answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    let values = if is_stream { answer.events() } else { vec![answer.json()] };
    for value in &values {
        collect(value, &mut all);
    }
    all
}

/// Returns what an answer says to paint: the arguments of calls in any dialect, and JSON in its text.
fn painted(answer: &Answer) -> Vec<Value> {
    fn collect(value: &Value, all: &mut Vec<Value>) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| collect(item, all)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if ["arguments", "partial_json"].contains(&name.as_str()) => {
                            all.extend(serde_json::from_str::<Value>(text));
                        }
                        Value::Object(_) if name == "input" => all.push(value.clone()),
                        _ => collect(value, all),
                    }
                }
            }
            _ => {}
        }
    }
    let is_stream = answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    let values = if is_stream { answer.events() } else { vec![answer.json()] };
    let mut all = Vec::new();
    for value in &values {
        collect(value, &mut all);
    }
    let text = texts(answer);
    all.extend(serde_json::Deserializer::from_str(&text).into_iter::<Value>().map_while(Result::ok));
    all.retain(|value| value.get("colour").is_some());
    all
}

/// Checks that the events of a stream have the order of their dialect, and that a whole answer has its form.
fn assert_form(path: &str, answer: &Answer) {
    let is_stream = answer.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    if !is_stream {
        let whole = answer.json();
        let (field, form) = match path {
            "/v1/chat/completions" => ("object", "chat.completion"),
            "/v1/completions" => ("object", "text_completion"),
            "/v1/responses" => ("object", "response"),
            "/v1/messages" => ("type", "message"),
            "/v2/chat" => {
                assert!(
                    whole["finish_reason"].is_string() && whole["message"]["role"] == "assistant",
                    "{whole}"
                );
                return;
            }
            _ => return,
        };
        assert_eq!(whole[field], form, "{path} {whole}");
        return;
    }
    let events = answer.events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap_or_default()).collect();
    let named: Vec<&str> = answer.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let ends = |first: &str, last: &[&str]| {
        assert_eq!(kinds[0], first, "{answer:?}");
        assert!(last.contains(&kinds[kinds.len() - 1]), "{answer:?}");
        assert_eq!(named, kinds, "each event has its name");
    };
    match path {
        "/v1/messages" => {
            ends("message_start", &["message_stop"]);
            assert_eq!(kinds[kinds.len() - 2], "message_delta");
            let count = |kind: &str| kinds.iter().filter(|known| **known == kind).count();
            assert_eq!(count("content_block_start"), count("content_block_stop"), "{answer:?}");
        }
        "/v1/responses" => {
            ends("response.created", &["response.completed", "response.incomplete"]);
            let numbers = events.iter().map(|event| event["sequence_number"].as_u64().unwrap());
            assert!(numbers.eq(0..events.len() as u64), "{answer:?}");
        }
        "/v2/chat" => ends("message-start", &["message-end"]),
        _ => {
            assert!(answer.body.ends_with("data: [DONE]\n\n"), "{answer:?}");
            // The role comes first, then texts and calls, then the reason, and nothing of this answer behind it.
            let choices: Vec<&Value> = events.iter().filter_map(|event| event["choices"].get(0)).collect();
            if path == "/v1/chat/completions" {
                assert_eq!(choices[0]["delta"]["role"], "assistant", "{answer:?}");
            }
            for index in choices.iter().map(|choice| choice["index"].as_u64().unwrap()) {
                let mut own = choices.iter().filter(|choice| choice["index"] == index);
                let end = own.find(|choice| choice["finish_reason"].is_string());
                assert!(end.is_some() && own.next().is_none(), "{index} {answer:?}");
            }
        }
    }
}

#[test]
fn recorded_requests_of_each_client_are_answered_as_then() {
    let (server, with_tools) = (reusing(), with_template(TAGGED));
    let mut forced = 0;
    let mut clients = std::collections::BTreeMap::<String, usize>::new();
    for line in RECORDED.lines() {
        let recorded: Value = serde_json::from_str(line).unwrap();
        let field = |name: &str| recorded[name].as_str().unwrap();
        let headers: Vec<(&str, &str)> = recorded["headers"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str().unwrap()))
            .collect();
        let is_about_tools = recorded["tools"] == true;
        let server = if is_about_tools { &with_tools } else { &server };
        let answer =
            call(server.address(), field("method"), field("path"), &headers, field("body").as_bytes());
        assert_eq!(u64::from(answer.status), recorded["status"].as_u64().unwrap(), "{line}\n{answer:?}");
        if answer.status == 200 {
            assert_form(field("path"), &answer);
        }
        *clients.entry(field("client").to_owned()).or_default() += 1;
        let asked: Value = serde_json::from_str(field("body")).unwrap_or_default();
        if is_about_tools {
            let made = painted(&answer);
            assert!(answer.status != 200 || !made.is_empty(), "{line}\n{answer:?}");
            made.iter().for_each(assert_paint);
            forced += made.len();
            continue;
        }
        // The small model answers no conversation with tools.
        let says_something_else = field("path").ends_with("/count_tokens")
            || asked["stop"].is_array()
            || asked["temperature"].as_f64().is_some_and(|temperature| temperature > 1.0)
            || field("body").contains("tool_result");
        if answer.status == 200 && field("body").contains(QUESTION.0) && !says_something_else {
            assert!(texts(&answer).contains(QUESTION.1), "{line}\n{answer:?}");
        }
    }
    let counted: Vec<(&str, usize)> = clients.iter().map(|(name, count)| (name.as_str(), *count)).collect();
    assert!(counted.iter().all(|(_, count)| *count > 1), "{counted:?}");
    let names: Vec<&str> = counted.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["anthropic", "cohere", "langchain", "llama-index", "openai"]);
    assert!(forced > clients.len(), "{forced}");
    assert_nothing_is_held(&server);
    assert_nothing_is_held(&with_tools);
}
