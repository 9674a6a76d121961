//! Schemas whose references form a long chain: refused in every dialect and place, and the server lives on.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{assert_nothing_is_held, question};
use crate::tooled::{TAGGED, paint, with_template};

/// Returns a schema in which each part refers to the next one.
fn chain(links: usize) -> Value {
    let parts: serde_json::Map<String, Value> = (0..links)
        .map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)})))
        .chain([(format!("a{links}"), json!({"type": "null"}))])
        .collect();
    json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": parts})
}

/// Returns requests with a schema at each of its places, with their paths and fields.
fn requests(schema: &Value) -> Vec<(&'static str, Value, &'static str)> {
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let format_beside = json!({"type": "json_schema", "name": "x", "schema": schema});
    let chat = |more| {
        let mut request = question(more);
        request.as_object_mut().unwrap().remove("documents");
        request
    };
    let tool = |schema: &Value| json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    let messages = json!([{"role": "user", "content": "a"}]);
    vec![
        ("/v1/chat/completions", chat(json!({"response_format": format})), "response_format"),
        ("/v1/chat/completions", chat(json!({"tools": [tool(schema)], "tool_choice": "required"})), "tools"),
        (
            "/v1/chat/completions",
            chat(
                json!({"tools": [tool(schema)], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            ),
            "tools",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"tools": [tool(&paint())], "response_format": format})),
            "response_format",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"tools": [tool(schema)], "response_format": {"type": "json_object"}})),
            "tools",
        ),
        ("/v1/completions", json!({"prompt": "a", "response_format": format}), "response_format"),
        ("/v1/responses", json!({"input": "a", "text": {"format": format_beside}}), "text.format"),
        (
            "/v1/responses",
            json!({"input": "a", "tool_choice": "required", "tools": [{"type": "function", "name": "f", "parameters": schema}]}),
            "tools",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 9, "output_format": format_beside}),
            "output_format",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 9, "tool_choice": {"type": "any"}, "tools": [{"name": "f", "input_schema": schema}]}),
            "tools",
        ),
        (
            "/v2/chat",
            json!({"messages": messages, "response_format": {"type": "json_object", "schema": schema}}),
            "response_format",
        ),
        (
            "/v2/chat",
            json!({"messages": messages, "tool_choice": "REQUIRED", "tools": [tool(schema)]}),
            "tools",
        ),
    ]
}

#[rstest]
fn a_chain_of_references_ends_no_server(#[values(5_000, 20_000)] links: usize) {
    let server = with_template(TAGGED);
    for (number, (path, request, field)) in requests(&chain(links)).into_iter().enumerate() {
        let answer = post(server.address(), path, &request);
        assert_eq!(answer.status, 400, "{number} {path} {}", answer.body);
        assert!(answer.body.contains("use fewer references"), "{number} {path} {}", answer.body);
        assert!(answer.body.contains(field), "{number} {path} {}", answer.body);
    }
    assert_nothing_is_held(&server);
}

#[test]
fn a_chain_of_references_within_the_limit_is_obeyed() {
    let server = with_template(TAGGED);
    for (number, (path, mut request, _)) in requests(&chain(40)).into_iter().enumerate() {
        for limit in ["max_tokens", "max_output_tokens"] {
            if request.get(limit).is_some() || (limit == "max_output_tokens") == (path == "/v1/responses") {
                request[limit] = json!(5);
            }
        }
        let answer = post(server.address(), path, &request);
        assert_eq!(answer.status, 200, "{number} {path} {}", answer.body);
    }
    assert_nothing_is_held(&server);
}

#[test]
fn a_tool_refers_to_no_other_tool() {
    let server = with_template(TAGGED);
    // Behind the place of the first tool, this would be that of the tenth.
    let tools: Vec<Value> = (0..10)
        .map(|i| {
            let schema = if i == 0 { json!({"$ref": "#0"}) } else { paint() };
            json!({"type": "function", "function": {"name": format!("f{i}"), "parameters": schema}})
        })
        .collect();
    let answer = post(
        server.address(),
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}),
    );
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tools")), "{answer:?}");
}
