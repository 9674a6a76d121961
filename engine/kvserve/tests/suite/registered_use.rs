//! Registered documents that change while they are used, and texts that are almost or more than a document.

use kvserve::{ApiKeys, Limits, Server, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, Client, call, get, post};
use crate::common::{
    DOCUMENTS, QUESTION, SYSTEM, assert_nothing_is_held, assert_only_used_documents_are_held, free_port,
    reuse, reusing, with,
};

const CHAT: &str = "/v1/chat/completions";

fn put(server: &Server, id: &str, body: Value) -> Answer {
    call(server.address(), "PUT", &format!("/v1/documents/{id}"), &[], body.to_string().as_bytes())
}

fn register(server: &Server, id: &str, text: &str) {
    let answer = put(server, id, json!({"text": text}));
    assert!([200, 201].contains(&answer.status), "{answer:?}");
}

/// Returns a chat with a text in front of the question.
fn pasted(system: &str, text: &str) -> Value {
    json!({
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": format!("{text}{}", QUESTION.0)}],
        "max_tokens": 1,
    })
}

/// Returns the IDs of the documents that are found in a chat.
fn found(server: &Server, request: &Value) -> Vec<String> {
    let answer = post(server.address(), CHAT, request);
    assert_eq!(answer.status, 200, "{answer:?}");
    let parts = answer.json()["kv"]["parts"].as_array().unwrap().clone();
    parts.iter().map(|part| part["id"].as_str().unwrap().to_owned()).collect()
}

/// Waits until something is so.
fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let is_so = (0..6000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        is_so()
    });
    assert!(is_so, "{what}");
}

#[rstest]
fn a_document_may_go_while_an_answer_uses_it(#[values(true, false)] expires: bool) {
    let server = reusing();
    let (id, text) = DOCUMENTS[0];
    let ttl = if expires { json!(1) } else { Value::Null };
    assert_eq!(put(&server, id, json!({"text": text, "ttl_seconds": ttl})).status, 201);
    let mut request = pasted(SYSTEM, text);
    for (name, value) in [("stream", json!(true)), ("ignore_eos", json!(true)), ("max_tokens", json!(1500))] {
        request[name] = value;
    }
    let mut client = Client::new(server.address());
    client.request("POST", CHAT, &[], request.to_string().as_bytes());
    assert_eq!(client.head().0, 200);
    client.chunk().unwrap();
    let path = format!("/v1/documents/{id}");
    if !expires {
        assert_eq!(call(server.address(), "DELETE", &path, &[], b"").status, 200);
    }
    wait_for("it never expires", || get(server.address(), &path).status == 404);
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk() {
        rest.extend(chunk);
    }
    let rest = String::from_utf8(rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert!(found(&server, &pasted(SYSTEM, text)).is_empty());
    assert_nothing_is_held(&server);
}

#[test]
fn a_document_that_changes_during_a_search_is_found_in_one_of_its_forms() {
    let server = reusing();
    let texts = [DOCUMENTS[0].1, DOCUMENTS[1].1];
    register(&server, "a", texts[0]);
    let address = server.address();
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let server = &server;
            scope.spawn(move || (0..30).for_each(|i| register(server, "a", texts[(writer + i) % 2])));
        }
        for _ in 0..2 {
            scope.spawn(move || {
                for _ in 0..15 {
                    let answer = post(address, CHAT, &pasted(SYSTEM, &texts.concat()));
                    assert_eq!(answer.status, 200, "{answer:?}");
                    let kv = answer.json()["kv"].clone();
                    let parts = kv["parts"].as_array().unwrap();
                    let own: Vec<&Value> = parts.iter().filter(|part| part["id"] == "a").collect();
                    assert!(own.len() <= 1, "{kv}");
                    for part in own {
                        let length = part["span"][1].as_u64().unwrap() - part["span"][0].as_u64().unwrap();
                        assert!(texts.iter().any(|text| text.len() as u64 == length), "{kv}");
                    }
                }
            });
        }
    });
    assert_eq!(get(address, "/v1/documents").json()["data"].as_array().unwrap().len(), 1);
    assert_only_used_documents_are_held(&server);
}

#[test]
fn each_tenant_has_its_own_limit_on_documents() {
    let mut keys = ApiKeys::default();
    assert!(keys.add("key-a", "alice") && keys.add("key-b", "bob"));
    let limits = Limits { documents: 2, ..Limits::default() };
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), limits, ..free_port() });
    let register = |key: &str, id: &str, text: &str| {
        let body = json!({"text": text}).to_string();
        call(server.address(), "PUT", &format!("/v1/documents/{id}"), &[("x-api-key", key)], body.as_bytes())
            .status
    };
    for key in ["key-a", "key-b"] {
        let status = DOCUMENTS.map(|(id, text)| register(key, id, text));
        assert_eq!(status, [201, 201, 409], "{key}");
    }
    let list = call(server.address(), "GET", "/v1/documents", &[("x-api-key", "key-b")], b"").json();
    assert_eq!(list["data"].as_array().unwrap().len(), 2);
}

#[test]
fn of_documents_that_overlap_the_first_and_longest_is_found() {
    let server = reusing();
    let both = [DOCUMENTS[0].1, DOCUMENTS[1].1].concat();
    let middle = &both[DOCUMENTS[0].1.len() - 70..DOCUMENTS[0].1.len() + 70];
    for (id, text) in
        [("first", DOCUMENTS[0].1), ("both", &both), ("middle", middle), ("second", DOCUMENTS[1].1)]
    {
        register(&server, id, text);
    }
    assert_eq!(found(&server, &pasted(SYSTEM, &both)), ["both"]);
    assert_eq!(found(&server, &pasted(SYSTEM, DOCUMENTS[0].1)), ["first"]);
    assert_eq!(found(&server, &pasted(SYSTEM, &format!("x {middle} "))), ["middle"]);
    call(server.address(), "DELETE", "/v1/documents/both", &[], b"");
    // The one that begins first ends behind the beginning of the other.
    assert_eq!(found(&server, &pasted(SYSTEM, &both)), ["first", "second"]);
    assert_eq!(found(&server, &pasted(SYSTEM, &DOCUMENTS[0].1.repeat(2))), ["first", "first"]);
    assert_only_used_documents_are_held(&server);
}

#[test]
fn line_breaks_and_forms_of_characters_are_bytes_like_others() {
    let server = reusing();
    let lines = "alba is red .\nbora is blue .\ncedo is green .\ndilan is white .\nrumi is black .\n";
    let composed =
        "caf\u{e9} \u{1f980} \u{8a9e} alba is red . bora is blue . cedo is green . dilan is white . ";
    register(&server, "lines", lines);
    register(&server, "composed", composed);
    assert_eq!(found(&server, &pasted(SYSTEM, lines)), ["lines"]);
    assert_eq!(found(&server, &pasted(SYSTEM, composed)), ["composed"]);
    assert!(found(&server, &pasted(SYSTEM, &lines.replace('\n', "\r\n"))).is_empty());
    assert!(found(&server, &pasted(SYSTEM, &composed.replace('\u{e9}', "e\u{301}"))).is_empty());
    register(&server, "windows", &lines.replace('\n', "\r\n"));
    assert_eq!(found(&server, &pasted(SYSTEM, &lines.replace('\n', "\r\n"))), ["windows"]);
    // JSON may write characters as escapes.
    let escaped = pasted(SYSTEM, composed)
        .to_string()
        .replace('\u{e9}', "\\u00e9")
        .replace('\u{1f980}', "\\ud83e\\udd80");
    let answer = call(server.address(), "POST", CHAT, &[], escaped.as_bytes()).json();
    assert_eq!(answer["kv"]["parts"][0]["id"], "composed", "{answer}");
    assert_only_used_documents_are_held(&server);
}

#[test]
fn a_document_across_two_messages_is_found_if_nothing_stands_between_its_parts() {
    let server = reusing();
    let text = DOCUMENTS[0].1;
    register(&server, "a", text);
    let at = text.len() / 2;
    let halves = |between: Value| {
        let mut messages = vec![
            json!({"role": "system", "content": SYSTEM}),
            json!({"role": "user", "content": text[..at]}),
        ];
        messages.extend(between.as_array().unwrap().iter().cloned());
        messages.push(json!({"role": "user", "content": format!("{}{}", &text[at..], QUESTION.0)}));
        json!({"messages": messages, "max_tokens": 1})
    };
    // The template of this model writes nothing between two messages of the user.
    assert_eq!(found(&server, &halves(json!([]))), ["a"]);
    assert!(found(&server, &halves(json!([{"role": "assistant", "content": "red"}]))).is_empty());
}

#[test]
fn a_document_behind_another_beginning_is_found_but_computed_again() {
    let server = reusing();
    let text = DOCUMENTS[0].1;
    register(&server, "a", text);
    let part = |request: Value| {
        let answer = post(server.address(), CHAT, &request).json();
        let parts = answer["kv"]["parts"].as_array().unwrap().clone();
        assert_eq!(parts.len(), 1, "{answer}");
        (parts[0]["source"].clone(), parts[0]["reason"].clone())
    };
    assert_eq!(part(pasted(SYSTEM, text)), (json!("computed"), json!("new")));
    assert_eq!(part(pasted(SYSTEM, text)), (json!("cache"), Value::Null));
    let other_context = (json!("computed"), json!("other_context"));
    assert_eq!(part(pasted("answer .", text)), other_context);
    // In a later turn, everything before it is its beginning.
    let mut later = pasted(SYSTEM, text);
    let question = later["messages"].as_array_mut().unwrap().pop().unwrap();
    later["messages"].as_array_mut().unwrap().extend([
        json!({"role": "user", "content": "bora ?"}),
        json!({"role": "assistant", "content": "blue"}),
        question,
    ]);
    assert_eq!(part(later.clone()), other_context);
    assert_eq!(part(later), (json!("cache"), Value::Null));
}

#[test]
fn documents_are_computed_without_the_places_of_requests_and_in_no_metric() {
    let limits = Limits { requests: 2, ..Limits::default() };
    let server = with(Some(reuse()), ServerConfig { limits, ..free_port() });
    let text = |i: usize| format!("{i} {}", DOCUMENTS[i % 3].1);
    for i in 0..10 {
        let answer = put(&server, &format!("d{i}"), json!({"text": text(i), "system": SYSTEM}));
        assert_eq!(answer.status, 201, "{answer:?}");
    }
    // One that is gone before its turn is left out.
    call(server.address(), "DELETE", "/v1/documents/d9", &[], b"");
    let answer = post(server.address(), CHAT, &pasted(SYSTEM, "alba is red . "));
    assert_eq!(answer.status, 200, "{answer:?}");
    let computed = || {
        let list = get(server.address(), "/v1/documents").json()["data"].as_array().unwrap().clone();
        list.iter().filter(|one| one["computed_ms"].is_number()).count()
    };
    wait_for("some are never computed", || computed() == 9);
    let metrics = get(server.address(), "/metrics").body;
    for name in ["time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"] {
        let line = format!("vllm:{name}_count{{model_name=\"tiny-rag\"}} 1");
        assert!(metrics.lines().any(|known| known == line), "{line} in {metrics}");
    }
    for i in 0..9 {
        let answer = post(server.address(), CHAT, &pasted(SYSTEM, &text(i))).json();
        assert_eq!(answer["kv"]["parts"][0]["source"], "cache", "{answer}");
        call(server.address(), "DELETE", &format!("/v1/documents/d{i}"), &[], b"");
    }
    assert_nothing_is_held(&server);
}

#[test]
fn without_reuse_nothing_is_computed_in_advance() {
    let server = crate::common::server();
    let answer = put(&server, "a", json!({"text": DOCUMENTS[0].1, "system": SYSTEM}));
    assert_eq!((answer.status, &answer.json()["computed_ms"]), (201, &Value::Null));
    assert_eq!(post(server.address(), CHAT, &pasted(SYSTEM, "alba is red . ")).status, 200);
    let lookups = server.with_engine(|engine| engine.report().main.unwrap().cached).unwrap();
    // Only what was asked is cached.
    let asked = post(server.address(), CHAT, &pasted(SYSTEM, "alba is red . ")).json();
    let blocks = asked["usage"]["prompt_tokens"].as_u64().unwrap().div_ceil(16);
    assert!(lookups as u64 <= blocks + 1, "{lookups} blocks for {asked}");
    assert!(get(server.address(), "/v1/documents/a").json()["computed_ms"].is_null());
}

#[test]
fn tokens_are_counted_as_they_are_found_with_documents() {
    let server = reusing();
    for (id, text) in DOCUMENTS {
        register(&server, id, text);
    }
    // A word of the prompt that begins in a document and ends behind it.
    let begun = DOCUMENTS[1].1.trim_end_matches(|c: char| !c.is_alphabetic()).get(1..).unwrap();
    let begun = &begun[..begun.len() - 2];
    register(&server, "begun", begun);
    let request = pasted(SYSTEM, &format!("{}\n\n {begun}xyz ", DOCUMENTS[0].1));
    let usage = post(server.address(), CHAT, &request).json()["usage"]["prompt_tokens"].clone();
    let counted = post(server.address(), "/tokenize", &json!({"messages": request["messages"]})).json();
    assert_eq!(counted["count"], usage);
    let message = request["messages"][1].clone();
    let messages = json!({"system": SYSTEM, "messages": [message], "max_tokens": 1});
    let counted = post(server.address(), "/v1/messages/count_tokens", &messages).json();
    assert_eq!(counted["input_tokens"], usage);
    let off = json!({"system": SYSTEM, "messages": [message], "registered_documents": false});
    let off = post(server.address(), "/v1/messages/count_tokens", &off).json();
    assert_ne!(off["input_tokens"], usage, "a document ends within a word");
    let wrong = json!({"prompt": "a", "documents": ["b"], "add_special_tokens": false});
    let answer = post(server.address(), "/tokenize", &wrong);
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("add_special_tokens")));
}

#[rstest]
#[case::title(json!({"text": DOCUMENTS[0].1, "title": "a".repeat(1025)}), "title has 1025 bytes")]
#[case::no_time(json!({"text": DOCUMENTS[0].1, "ttl_seconds": 0}), "ttl_seconds must be at least 1")]
#[case::little_time(json!({"text": DOCUMENTS[0].1, "ttl_seconds": 0.001}), "ttl_seconds must be at least 1")]
fn titles_and_times_have_limits(#[case] body: Value, #[case] words: &str) {
    let server = reusing();
    let answer = put(&server, "a", body);
    assert!(answer.status == 400 && answer.body.contains(words), "{answer:?}");
    assert_eq!(get(server.address(), "/v1/documents").json()["data"], json!([]));
}

#[test]
fn what_is_no_utf8_in_a_path_is_refused_behind_the_key() {
    let mut keys = ApiKeys::default();
    keys.add("key", "alice");
    let server = with(None, ServerConfig { keys: Some(keys), ..free_port() });
    for method in ["GET", "DELETE", "PUT"] {
        let ask = |headers: &[(&str, &str)]| {
            let body =
                if method == "PUT" { json!({"text": DOCUMENTS[0].1}).to_string() } else { String::new() };
            call(server.address(), method, "/v1/documents/%FF", headers, body.as_bytes())
        };
        assert_eq!(ask(&[]).status, 401, "{method}");
        let refused = ask(&[("x-api-key", "key")]);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("id")), "{method}");
    }
    let model = call(server.address(), "GET", "/v1/models/%FF", &[("x-api-key", "key")], b"");
    assert_eq!((model.status, &model.json()["error"]["param"]), (400, &json!("model")));
    assert_eq!(call(server.address(), "GET", "/v1/models/%FF", &[], b"").status, 401);
}

#[test]
fn without_documents_a_server_finds_none() {
    let limits = Limits { documents: 0, ..Limits::default() };
    let server = with(Some(reuse()), ServerConfig { limits, ..free_port() });
    assert_eq!(put(&server, "a", json!({"text": DOCUMENTS[0].1})).status, 409);
    assert!(found(&server, &pasted(SYSTEM, DOCUMENTS[0].1)).is_empty());
}
