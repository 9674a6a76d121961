//! `response_format` of `/v1/chat/completions` and `/v1/completions`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{assert_nothing_is_held, question, server};
use crate::tooled::{assert_paint, paint};

const CHAT: &str = "/v1/chat/completions";

fn schema(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "paint", "schema": schema, "strict": true}})
}

#[test]
fn answers_match_their_schemas_whole_and_streamed() {
    let server = server();
    for seed in 0..4 {
        let mut asked = question(
            json!({"response_format": schema(paint()), "temperature": 1.5, "seed": seed, "max_tokens": 400}),
        );
        let whole = post(server.address(), CHAT, &asked);
        assert_eq!(whole.status, 200, "{whole:?}");
        let choice = whole.json()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        let text = choice["message"]["content"].as_str().unwrap().to_owned();
        assert_paint(&serde_json::from_str(&text).unwrap());
        asked["stream"] = json!(true);
        let streamed = post(server.address(), CHAT, &asked);
        let events = streamed.events();
        let texts = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(texts.collect::<String>(), text);
    }
    assert_nothing_is_held(&server);
}

#[test]
fn json_objects_and_completions_have_the_form_that_is_asked_for() {
    let server = server();
    // Such an object may have no end, so that only one that ended is checked.
    let object = json!({"response_format": {"type": "json_object"}, "temperature": 1.5, "max_tokens": 300});
    let mut ended = 0;
    for seed in 0..8 {
        let mut asked = question(object.clone());
        asked["seed"] = json!(seed);
        let choice = post(server.address(), CHAT, &asked).json()["choices"][0].clone();
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(text.trim_start().starts_with('{'), "{choice}");
        if choice["finish_reason"] == "stop" {
            assert!(serde_json::from_str::<Value>(text).unwrap().is_object());
            ended += 1;
        }
    }
    assert!(ended > 0);
    let asked = json!({"prompt": ["alba ?", "bela ?"], "response_format": schema(paint()), "max_tokens": 400, "n": 2});
    let choices = post(server.address(), "/v1/completions", &asked).json()["choices"].clone();
    assert_eq!(choices.as_array().unwrap().len(), 4);
    for choice in choices.as_array().unwrap() {
        assert_paint(&serde_json::from_str(choice["text"].as_str().unwrap()).unwrap());
    }
    let text = json!({"response_format": {"type": "text"}});
    let plain = |more| post(server.address(), CHAT, &question(more)).json()["choices"][0]["message"].clone();
    assert_eq!(plain(text), plain(json!({})));
    assert_nothing_is_held(&server);
}

#[rstest]
#[case::kind(json!({"type": "xml"}), "response_format.type", "use text, json_object or json_schema")]
#[case::no_kind(json!({}), "response_format.type", "an object with a type")]
#[case::word(json!("json"), "response_format.type", "an object with a type")]
#[case::no_schema(json!({"type": "json_schema"}), "response_format.json_schema.schema", "a JSON schema")]
#[case::list(schema(json!([1])), "response_format.json_schema.schema", "a JSON schema")]
#[case::unknown_type(schema(json!({"type": "colour"})), "response_format", "the constraint")]
#[case::keyword(schema(json!({"type": "object", "properties": {"a": {"not": {}}}})), "response_format", "the constraint")]
#[case::nothing_fits(schema(json!({"type": "integer", "minimum": 3, "maximum": 2})), "response_format", "the constraint")]
#[case::reference(schema(json!({"$ref": "#/$defs/a"})), "response_format", "the constraint")]
#[case::elsewhere(schema(json!({"$ref": "https://example.com/schema.json"})), "response_format", "the constraint")]
#[case::deep(schema((0..110).fold(json!({}), |inner, _| json!({"items": inner}))), "response_format", "levels deep")]
#[case::long(schema(json!({"enum": ["a".repeat(2 << 20)]})), "response_format", "bytes, and the limit is")]
fn malformed_and_hostile_schemas_are_refused(
    #[case] format: Value,
    #[case] param: &str,
    #[case] words: &str,
) {
    let server = server();
    for path in [CHAT, "/v1/completions"] {
        let mut asked = question(json!({"response_format": format}));
        if path != CHAT {
            asked = json!({"prompt": "alba ?", "response_format": format});
        }
        let answer = post(server.address(), path, &asked);
        assert_eq!(answer.status, 400, "{answer:?}");
        let error = &answer.json()["error"];
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    assert_nothing_is_held(&server);
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200, "the server lives on");
}
