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
