//! Registered documents: they are found verbatim in any later prompt of the same tenant.

use kvserve::{ApiKeys, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, call, get, post};
use crate::common::{
    DOCUMENTS, QUESTION, SYSTEM, add, assert_nothing_is_held, assert_only_used_documents_are_held, free_port,
    reuse, reusing, server, with,
};

const CHAT: &str = "/v1/chat/completions";

fn put(server: &kvserve::Server, id: &str, body: &Value) -> Answer {
    call(server.address(), "PUT", &format!("/v1/documents/{id}"), &[], body.to_string().as_bytes())
}

/// Registers the demo's documents.
fn register(server: &kvserve::Server) {
    for (id, text) in DOCUMENTS {
        let answer = put(server, id, &json!({"text": text, "title": format!("about {id}")}));
        assert_eq!(answer.status, 201, "{answer:?}");
    }
}

/// Returns a request with the texts of documents pasted into the user's message.
fn pasted(order: &[usize], more: Value) -> Value {
    let texts: String = order.iter().map(|&at| DOCUMENTS[at].1).collect();
    let mut request = json!({
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": format!("{texts}{}", QUESTION.0)}],
        "temperature": 0,
        "max_tokens": 8,
    });
    add(&mut request, more);
    request
}

fn parts(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["kv"]["parts"].as_array().unwrap().clone()
}

#[test]
fn pasted_documents_are_found_in_any_order_and_place() {
    let server = reusing();
    register(&server);
    let first = post(server.address(), CHAT, &pasted(&[0, 1, 2], json!({})));
    let found = parts(&first);
    let ids: Vec<_> = found.iter().map(|part| part["id"].as_str().unwrap()).collect();
    assert_eq!(ids, DOCUMENTS.map(|(id, _)| id));
    for (part, (_, text)) in found.iter().zip(DOCUMENTS) {
        let span: Vec<u64> = part["span"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
        assert_eq!(span[1] - span[0], text.len() as u64);
        assert_eq!(part["source"], "computed");
    }
    let again = post(server.address(), CHAT, &pasted(&[2, 0, 1], json!({})));
    assert!(parts(&again).iter().all(|part| part["source"] == "cache"), "{again:?}");
    assert_eq!(
        again.json()["choices"][0]["message"]["content"].as_str().unwrap().trim(),
        QUESTION.1,
        "{again:?}"
    );
    // In the other dialects, and in a plain text.
    let messages = pasted(&[1, 2], json!({}))["messages"][1].clone();
    for (path, request) in [
        ("/v1/messages", json!({"system": SYSTEM, "messages": [messages], "max_tokens": 4})),
        ("/v1/responses", json!({"instructions": SYSTEM, "input": [messages], "max_output_tokens": 4})),
        ("/v2/chat", json!({"messages": pasted(&[1, 2], json!({}))["messages"], "max_tokens": 4})),
    ] {
        let answer = post(server.address(), path, &request);
        let found = parts(&answer);
        assert_eq!(found.len(), 2, "{path} {answer:?}");
        assert!(found.iter().all(|part| part["source"] == "cache"), "{path} {answer:?}");
    }
    let text = format!("{SYSTEM}{}{}", DOCUMENTS[1].1, QUESTION.0);
    let answer = post(server.address(), "/v1/completions", &json!({"prompt": text, "max_tokens": 4}));
    assert_eq!(parts(&answer)[0]["id"], DOCUMENTS[1].0);
    assert_only_used_documents_are_held(&server);
}

#[test]
fn a_text_that_differs_by_a_byte_is_not_found_and_a_request_can_turn_the_search_off() {
    let server = reusing();
    register(&server);
    let mut request = pasted(&[0], json!({}));
    let text = request["messages"][1]["content"].as_str().unwrap().replacen(" is ", " iz ", 1);
    request["messages"][1]["content"] = json!(text);
    assert_eq!(parts(&post(server.address(), CHAT, &request)), Vec::<Value>::new());
    let off = pasted(&[0, 1], json!({"registered_documents": false}));
    assert_eq!(parts(&post(server.address(), CHAT, &off)), Vec::<Value>::new());
    assert_eq!(parts(&post(server.address(), CHAT, &pasted(&[0, 1], json!({})))).len(), 2);
    // With full attention, texts are not cut.
    let server = crate::common::server();
    register(&server);
    assert_eq!(parts(&post(server.address(), CHAT, &pasted(&[0, 1], json!({})))), Vec::<Value>::new());
}

#[test]
fn text_between_documents_stays_where_it_is() {
    let server = reusing();
    register(&server);
    let message = format!("{}note . {}{}", DOCUMENTS[0].1, DOCUMENTS[1].1, QUESTION.0);
    let request = json!({"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}], "max_tokens": 2});
    let found = parts(&post(server.address(), CHAT, &request));
    let ids: Vec<_> = found.iter().map(|part| part["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [DOCUMENTS[0].0, "text 2", DOCUMENTS[1].0]);
    assert!(found[1]["span"].is_null());
}

#[test]
fn documents_are_listed_replaced_and_forgotten() {
    let server = server();
    let none = get(server.address(), "/v1/documents").json();
    assert_eq!((&none["data"], &none["bytes"]), (&json!([]), &json!(0)));
    register(&server);
    let (id, text) = DOCUMENTS[0];
    let listed = get(server.address(), "/v1/documents").json();
    assert_eq!(listed["data"].as_array().unwrap().len(), DOCUMENTS.len());
    let shown = get(server.address(), &format!("/v1/documents/{id}")).json();
    assert_eq!(
        (&shown["id"], &shown["text"], &shown["bytes"]),
        (&json!(id), &json!(text), &json!(text.len()))
    );
    assert_eq!(shown["title"], format!("about {id}"));
    let counted = post(server.address(), "/tokenize", &json!({"prompt": text, "add_special_tokens": false}));
    assert_eq!(shown["tokens"], counted.json()["count"]);
    assert!(shown["kv_bytes"].as_u64().unwrap() > shown["tokens"].as_u64().unwrap());
    assert!(shown["computed_ms"].is_null() && shown["expires_in_seconds"].is_null());
    let replaced = put(&server, id, &json!({"text": text.repeat(2), "ttl_seconds": 1000}));
    assert_eq!((replaced.status, &replaced.json()["bytes"]), (200, &json!(2 * text.len())));
    assert!((900.0..=1000.0).contains(&replaced.json()["expires_in_seconds"].as_f64().unwrap()));
    let gone = call(server.address(), "DELETE", &format!("/v1/documents/{id}"), &[], b"");
    assert_eq!((gone.status, &gone.json()["deleted"]), (200, &json!(true)));
    for method in ["GET", "DELETE"] {
        let missing = call(server.address(), method, &format!("/v1/documents/{id}"), &[], b"");
        assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("document_not_found")));
    }
    let named = put(&server, "a/b%20c", &json!({"text": text, "ttl_seconds": 1}));
    assert_eq!((named.status, &named.json()["id"]), (201, &json!("a/b c")));
    assert!(named.json()["expires_in_seconds"].as_f64().unwrap() <= 1.0);
    let expired = (0..6000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        get(server.address(), "/v1/documents/a/b%20c").status == 404
    });
    assert!(expired);
    assert_eq!(
        get(server.address(), "/v1/documents").json()["data"].as_array().unwrap().len(),
        DOCUMENTS.len() - 1
    );
}

#[test]
fn a_document_is_computed_at_leisure_behind_a_system_prompt() {
    let server = reusing();
    let (id, text) = DOCUMENTS[0];
    assert_eq!(put(&server, id, &json!({"text": text, "system": SYSTEM})).status, 201);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while get(server.address(), &format!("/v1/documents/{id}")).json()["computed_ms"].is_null() {
        assert!(std::time::Instant::now() < until, "it is never computed");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let answer = post(server.address(), CHAT, &pasted(&[0], json!({})));
    assert_eq!(parts(&answer)[0]["source"], "cache", "{answer:?}");
    // It is pinned while it is registered.
    assert_eq!(call(server.address(), "DELETE", &format!("/v1/documents/{id}"), &[], b"").status, 200);
    assert_nothing_is_held(&server);
}

#[rstest]
#[case::short(json!({"text": "short"}), 400, "at least")]
#[case::blank(json!({"text": " ".repeat(100)}), 400, "empty")]
#[case::missing(json!({"title": "a"}), 400, "text")]
#[case::kind(json!({"text": 5}), 400, "text")]
#[case::unknown(json!({"text": "a", "pinned": true}), 400, "pinned")]
#[case::negative(json!({"text": "a", "ttl_seconds": -1}), 400, "ttl_seconds")]
#[case::huge(json!({"text": "a", "ttl_seconds": 1e300}), 400, "ttl_seconds")]
#[case::too_much(json!({"text": "a ".repeat(200)}), 409, "limit")]
fn documents_that_cannot_be_registered_are_refused(
    #[case] body: Value,
    #[case] status: u16,
    #[case] named: &str,
) {
    let config = free_port();
    let limits = kvserve::Limits { documents: 2, document_bytes: 300, ..config.limits };
    let server = with(Some(reuse()), ServerConfig { limits, ..free_port() });
    let refused = put(&server, "a", &body);
    assert_eq!(refused.status, status, "{refused:?}");
    assert!(refused.body.contains(named), "{refused:?}");
    assert_eq!(get(server.address(), "/v1/documents").json()["data"], json!([]));
    for id in ["a", "b"] {
        assert_eq!(put(&server, id, &json!({"text": "b ".repeat(40)})).status, 201);
    }
    let full = put(&server, "c", &json!({"text": "b ".repeat(40)}));
    assert!(full.status == 409 && full.body.contains("documents"), "{full:?}");
}

#[test]
fn documents_of_a_tenant_are_found_by_nobody_else() {
    let mut keys = ApiKeys::default();
    for (key, tenant) in [("key-a", "alice"), ("key-b", "bob")] {
        assert!(keys.add(key, tenant));
    }
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), ..free_port() });
    let with_key = |method: &str, path: &str, key: &str, body: &Value| {
        let header = ("authorization", &*format!("Bearer {key}"));
        call(server.address(), method, path, &[header], body.to_string().as_bytes())
    };
    let (id, text) = DOCUMENTS[0];
    let path = format!("/v1/documents/{id}");
    assert_eq!(with_key("PUT", &path, "key-a", &json!({"text": text})).status, 201);
    assert_eq!(call(server.address(), "GET", &path, &[], b"").status, 401);
    assert_eq!(with_key("GET", &path, "key-b", &json!({})).status, 404);
    assert_eq!(with_key("DELETE", &path, "key-b", &json!({})).status, 404);
    assert_eq!(with_key("GET", "/v1/documents", "key-b", &json!({})).json()["data"], json!([]));
    assert_eq!(parts(&with_key("POST", CHAT, "key-a", &pasted(&[0], json!({})))).len(), 1);
    assert_eq!(parts(&with_key("POST", CHAT, "key-b", &pasted(&[0], json!({})))).len(), 0);
}
