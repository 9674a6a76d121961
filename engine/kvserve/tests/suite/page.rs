//! The page, and the data that it shows.

use kvserve::{ApiKeys, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{call, get, post};
use crate::common::{DOCUMENTS, free_port, question, reuse, reusing, server, with};

fn overview(server: &kvserve::Server) -> Value {
    let answer = get(server.address(), "/overview");
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

/// Returns the sum of a number over the parts of a request.
fn sum(request: &Value, number: &str) -> u64 {
    request["segments"].as_array().unwrap().iter().map(|segment| segment[number].as_u64().unwrap()).sum()
}

#[test]
fn the_page_is_one_file_that_loads_nothing_from_elsewhere() {
    let server = server();
    let page = get(server.address(), "/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(page.header("content-security-policy").unwrap().starts_with("default-src 'self';"));
    assert!(page.body.starts_with("<!doctype html>") && page.body.ends_with("</html>\n"));
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.body.contains(outside), "{outside}");
    }
    // Texts of clients are shown as text.
    for risky in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!page.body.contains(risky), "{risky}");
    }
}

#[rstest]
fn requests_are_drawn_in_parts(#[values(false, true)] reuses: bool) {
    let server = if reuses { reusing() } else { server() };
    assert_eq!(overview(&server)["recent"], json!([]));
    assert_eq!(overview(&server)["first_token_ms"], Value::Null);
    let mut reports = Vec::new();
    let mut reversed = DOCUMENTS.map(|(id, text)| json!({"id": id, "text": text}));
    reversed.reverse();
    for more in [json!({}), json!({}), json!({"documents": reversed})] {
        let answer = post(server.address(), "/v1/chat/completions", &question(more));
        assert_eq!(answer.status, 200, "{answer:?}");
        reports.insert(0, answer.json());
    }
    let shown = overview(&server);
    let recent = shown["recent"].as_array().unwrap();
    assert_eq!(recent.len(), 3);
    for (request, answer) in recent.iter().zip(&reports) {
        let (usage, kv) = (&answer["usage"], &answer["kv"]);
        assert_eq!(request["prompt_tokens"], usage["prompt_tokens"]);
        assert_eq!(sum(request, "tokens"), usage["prompt_tokens"].as_u64().unwrap());
        assert_eq!(sum(request, "found"), kv["reused"].as_u64().unwrap());
        assert_eq!(request["recomputed"], kv["recomputed"]);
        let segments = request["segments"].as_array().unwrap();
        let kinds: Vec<_> = segments.iter().map(|segment| segment["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["system", "document", "document", "document", "question"]);
        for (segment, part) in segments[1..4].iter().zip(kv["parts"].as_array().unwrap()) {
            assert_eq!((&segment["name"], &segment["tokens"]), (&part["id"], &part["tokens"]));
            let (found, tokens) = (segment["found"].as_u64().unwrap(), segment["tokens"].as_u64().unwrap());
            let expected = match part["source"].as_str().unwrap() {
                "cache" => found == tokens,
                "partly" => (1..tokens).contains(&found),
                _ => found == 0,
            };
            assert!(expected, "{segment} {part}");
        }
    }
    let of_documents = |request: &Value| {
        let segments = request["segments"].as_array().unwrap();
        segments[1..4].iter().map(|segment| segment["found"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(of_documents(&recent[2]), 0, "new");
    assert!(of_documents(&recent[1]) > 0, "again");
    assert_eq!(of_documents(&recent[0]) == of_documents(&recent[1]), reuses, "in another order");
    assert_eq!(reports[2]["kv"]["prefix_missed"], "new");
    assert_eq!(recent[2]["segments"][0]["reason"], "new");
    assert!(shown["first_token_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(shown["totals"]["ended"], 3);
    let pools = shown["pools"].as_array().unwrap();
    for pool in pools {
        let part = |name: &str| pool[name].as_u64().unwrap();
        assert_eq!(part("total"), part("free") + part("mutable") + part("shared") + part("cached"));
        assert!(part("bytes") > 0);
    }
    assert_eq!(pools.len(), 2);
}

#[test]
fn the_first_registered_documents_are_listed() {
    let server = reusing();
    assert_eq!(overview(&server)["registered"], json!({"count": 0, "bytes": 0, "listed": []}));
    let text = |number: usize| {
        format!("The house with the number {number} stands at the end of the long road to the harbour.\n")
    };
    let put = |number: usize, more: Value| {
        let mut body = json!({"text": text(number)});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let path = format!("/v1/documents/house-{number:02}");
        let answer = call(server.address(), "PUT", &path, &[], body.to_string().as_bytes());
        assert_eq!(answer.status, 201, "{answer:?}");
        answer.json()
    };
    let first = put(0, json!({"title": "The first house", "ttl_seconds": 90}));
    let all: Vec<Value> = [first].into_iter().chain((1..23).map(|number| put(number, json!({})))).collect();
    let shown = &overview(&server)["registered"];
    let bytes: u64 = all.iter().map(|one| one["bytes"].as_u64().unwrap() + 8).sum();
    assert_eq!(
        (&shown["count"], shown["bytes"].as_u64()),
        (&json!(23), Some(bytes + "The first house".len() as u64))
    );
    let listed = shown["listed"].as_array().unwrap();
    assert_eq!(listed.len(), 20);
    for (row, document) in listed.iter().zip(&all) {
        for field in ["id", "title", "tokens", "kv_bytes", "pinned"] {
            assert_eq!(row[field], document[field], "{field}");
        }
    }
    let left = listed[0]["expires_in_seconds"].as_f64().unwrap();
    assert!((0.0..=90.0).contains(&left), "{left}");
    assert_eq!((&listed[1]["expires_in_seconds"], &listed[1]["tenant"]), (&Value::Null, &Value::Null));
}

#[test]
fn only_the_operator_sees_the_requests_of_tenants() {
    let mut keys = ApiKeys::default();
    for (key, tenant) in [("key-a", "alice"), ("key-op", "operator")] {
        assert!(keys.add(key, tenant));
    }
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), ..free_port() });
    let with_key = |method: &str, path: &str, key: &str, body: &[u8]| {
        call(server.address(), method, path, &[("authorization", &format!("Bearer {key}"))], body)
    };
    let asked = with_key("POST", "/v1/chat/completions", "key-a", question(json!({})).to_string().as_bytes());
    assert_eq!(asked.status, 200);
    assert_eq!(get(server.address(), "/").status, 200, "the page has no data");
    assert_eq!(get(server.address(), "/overview").status, 401);
    assert_eq!(with_key("GET", "/overview", "key-a", b"").status, 403);
    let shown = with_key("GET", "/overview", "key-op", b"").json();
    assert_eq!(shown["recent"][0]["tenant"], "alice");
}

#[test]
fn the_last_forty_requests_are_kept() {
    let server = server();
    for _ in 0..43 {
        assert_eq!(
            post(server.address(), "/v1/completions", &json!({"prompt": "alba", "max_tokens": 1})).status,
            200
        );
    }
    let shown = overview(&server);
    assert_eq!((shown["recent"].as_array().unwrap().len(), &shown["totals"]["ended"]), (40, &json!(43)));
}
