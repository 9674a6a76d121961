//! Tenants: what one of them caches, no other finds.

use kvserve::{ApiKeys, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, call};
use crate::common::{DOCUMENTS, QUESTION, SYSTEM, assert_nothing_is_held, free_port, question, reuse, with};

const CHAT: &str = "/v1/chat/completions";

fn server() -> kvserve::Server {
    let mut keys = ApiKeys::default();
    for (key, tenant) in [("key-a", "alice"), ("key-a2", "alice"), ("key-b", "bob"), ("key-op", "operator")] {
        assert!(keys.add(key, tenant));
    }
    assert!(!keys.add("key-a", "bob"), "a key has one tenant");
    with(Some(reuse()), ServerConfig { keys: Some(keys), ..free_port() })
}

fn ask(server: &kvserve::Server, key: &str, more: Value) -> Answer {
    let header = ("authorization", &*format!("Bearer {key}"));
    call(server.address(), "POST", CHAT, &[header], question(more).to_string().as_bytes())
}

/// Returns the number of prompt tokens that were found.
fn reused(answer: &Answer) -> u64 {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["kv"]["reused"].as_u64().unwrap()
}

#[test]
fn tenants_share_nothing_that_is_cached() {
    let server = server();
    assert_eq!(reused(&ask(&server, "key-a", json!({}))), 0);
    let own = reused(&ask(&server, "key-a", json!({})));
    assert!(own > 0);
    assert_eq!(reused(&ask(&server, "key-a2", json!({}))), own, "another key of the same tenant");
    // Nothing that another tenant writes into a request leads there, nor does its miss say why.
    for more in [
        json!({}),
        json!({"cache_salt": "alice"}),
        json!({"cache_salt": "chunk_cache"}),
        json!({"prompt_cache_key": "alice", "user": "alice"}),
    ] {
        server.with_engine(|engine| {
            let chunks = engine.chunks().unwrap();
            let (bob, _) = chunks.tenant("bob").unwrap();
            chunks.clear_tenant(bob);
        });
        let answer = ask(&server, "key-b", more.clone());
        let fresh = answer.json();
        // The label is none that divides, so bob finds what he had before.
        assert_eq!(reused(&answer) == 0, more.get("prompt_cache_key").is_none(), "{more}: {answer:?}");
        let parts = fresh["kv"]["parts"].as_array().unwrap();
        assert!(parts.iter().all(|part| part["source"] == "computed"), "{more}: {answer:?}");
        assert!(parts.iter().all(|part| part["reason"] != "other_context"), "{more}: {answer:?}");
    }
    assert_nothing_is_held(&server);
}

/// A tenant is told the same about its own requests whatever another tenant has, while both have room.
#[test]
fn counts_and_reasons_of_a_tenant_tell_nothing_about_another() {
    let told = |others: bool| {
        let server = server();
        let busy = || {
            for salt in ["one", "two"].iter().filter(|_| others) {
                ask(&server, "key-a", json!({"cache_salt": salt}));
                ask(&server, "key-a", json!({}));
            }
        };
        let mut all = Vec::new();
        for more in [
            json!({}),
            json!({}),
            json!({"cache_salt": "one"}),
            json!({"documents": ["alba is red ."]}),
            json!({}),
        ] {
            busy();
            let answer = ask(&server, "key-b", more).json();
            let kv = &answer["kv"];
            let fields = [
                "reused",
                "recomputed",
                "computed",
                "prefix_missed",
                "parts",
                "full_attention",
                "not_reused",
            ];
            all.push((answer["usage"].clone(), fields.map(|field| kv[field].clone())));
            let header = ("x-api-key", "key-b");
            let listed = call(server.address(), "GET", "/v1/documents", &[header], b"").json();
            assert_eq!((&listed["data"], &listed["bytes"]), (&json!([]), &json!(0)));
        }
        assert_nothing_is_held(&server);
        all
    };
    assert_eq!(told(true), told(false));
}

/// The work of a tenant's lookups: its counters, and the uses and holders of each of its pieces.
fn work(server: &kvserve::Server, tenant: &'static str) -> (Value, Vec<(String, u64, usize)>) {
    let work = server.with_engine(move |engine| {
        let chunks = engine.chunks().unwrap();
        let (id, _) = chunks.tenant(tenant).unwrap();
        let mut pieces: Vec<_> = chunks
            .chunks()
            .into_iter()
            .filter(|piece| piece.tenant == tenant)
            .map(|piece| (format!("{:?}", piece.chunk_hash), piece.access_count, piece.ref_count as usize))
            .collect();
        pieces.sort();
        (serde_json::to_value(chunks.tenant_metrics(id)).unwrap(), pieces)
    });
    work.unwrap()
}

#[test]
fn a_tenants_lookups_do_the_same_work_whatever_others_have() {
    let register = |server: &kvserve::Server, key: &str| {
        for (id, text) in DOCUMENTS {
            let body = json!({"text": text}).to_string();
            let path = format!("/v1/documents/{id}");
            assert_eq!(
                call(server.address(), "PUT", &path, &[("x-api-key", key)], body.as_bytes()).status,
                201
            );
        }
    };
    // Bob's prompts: with documents that he names, with the same texts pasted, and under alice's IDs.
    let pasted: String = DOCUMENTS.iter().map(|(_, text)| *text).collect();
    let pasted = json!([{"role": "system", "content": SYSTEM}, {"role": "user", "content": format!("{pasted}{}", QUESTION.0)}]);
    let asks = [json!({}), json!({"documents": null, "messages": pasted}), json!({"cache_salt": "alice"})];
    let (beside, alone) = (server(), server());
    register(&beside, "key-a");
    for more in &asks {
        assert_eq!(ask(&beside, "key-a", more.clone()).status, 200);
    }
    let before = work(&beside, "alice");
    assert!(before.0["lookup_count"].as_u64().unwrap() > 0 && !before.1.is_empty(), "{before:?}");
    for round in 0..2 {
        for more in &asks {
            let [first, second] = [&beside, &alone].map(|server| ask(server, "key-b", more.clone()).json());
            assert_eq!(first["kv"]["parts"], second["kv"]["parts"], "{round} {more}");
            assert_eq!(first["kv"]["reused"], second["kv"]["reused"], "{round} {more}");
        }
        assert_eq!(
            work(&beside, "alice"),
            before,
            "none of her pieces was touched, and no counter has moved"
        );
        assert_eq!(
            work(&beside, "bob"),
            work(&alone, "bob"),
            "his lookups are those of a server without her"
        );
    }
}

#[test]
fn metrics_name_the_tenants_of_the_keys_and_nobody_else() {
    let server = server();
    for (key, more) in [("key-a", json!({})), ("key-a2", json!({"cache_salt": "x", "user": "mallory"}))] {
        assert_eq!(ask(&server, key, more).status, 200);
    }
    let metrics = call(server.address(), "GET", "/metrics", &[("x-api-key", "key-op")], b"").body;
    let value = |name: &str, tenant: &str| -> f64 {
        let line = format!("kvchunk_tenant_{name}{{tenant=\"{tenant}\"}} ");
        let found = metrics.lines().find_map(|known| known.strip_prefix(&line));
        found.unwrap_or_else(|| panic!("{line} in {metrics}")).parse().unwrap()
    };
    let documents = DOCUMENTS.len() as f64;
    assert_eq!((value("misses_total", "alice"), value("misses_total", "bob")), (2.0 * documents, 0.0));
    assert_eq!((value("chunks", "alice"), value("chunks", "bob")), (2.0 * documents, 0.0));
    assert!(value("used_blocks", "alice") > 0.0 && value("computed_tokens_total", "alice") > 0.0);
    let tags: std::collections::BTreeSet<&str> =
        metrics.split("tenant=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(tags.into_iter().collect::<Vec<_>>(), ["alice", "bob", "operator"]);
    // Sums over the cache stay those of the cache.
    assert!(
        metrics.contains(&format!("kvchunk_misses_total{{cache=\"chunks\"}} {:.1}\n", 2.0 * documents)),
        "{metrics}"
    );
    // Without keys, there are no tenants to name.
    let open = with(Some(reuse()), free_port());
    let metrics = call(open.address(), "GET", "/metrics", &[], b"").body;
    assert!(metrics.contains("kvchunk_misses_total") && !metrics.contains("kvchunk_tenant_"), "{metrics}");
}

#[test]
fn requests_are_counted_by_the_label_of_their_client_and_tenant() {
    let server = server();
    let label = json!({"prompt_cache_key": "search"});
    let answers = [("key-a", &label), ("key-a2", &label), ("key-b", &label), ("key-b", &json!({}))]
        .map(|(key, more)| ask(&server, key, more.clone()).json());
    for (path, prompt) in [("/v1/completions", "prompt"), ("/v1/responses", "input")] {
        let body = json!({"model": "tiny-rag", prompt: "alba is red .", "prompt_cache_key": path});
        let key = ("x-api-key", "key-b");
        assert_eq!(
            call(server.address(), "POST", path, &[key], body.to_string().as_bytes()).status,
            200,
            "{path}"
        );
    }
    for key in ["key-a", "key-b"] {
        assert_eq!(call(server.address(), "GET", "/metrics", &[("x-api-key", key)], b"").status, 403);
    }
    let metrics = call(server.address(), "GET", "/metrics", &[("x-api-key", "key-op")], b"").body;
    let value = |name: &str, label: &str, tenant: &str| -> u64 {
        let line = format!("kvserve:label_{name}_total{{label=\"{label}\",tenant=\"{tenant}\"}} ");
        let found = metrics.lines().find_map(|known| known.strip_prefix(&line));
        found.unwrap_or_else(|| panic!("{line} in {metrics}")).parse::<f64>().unwrap() as u64
    };
    let sum = |place: &str, of: std::ops::Range<usize>| -> u64 {
        answers[of].iter().map(|answer| answer.pointer(place).unwrap().as_u64().unwrap()).sum()
    };
    for (tenant, requests, of) in [("alice", 2, 0..2), ("bob", 1, 2..3)] {
        assert_eq!(value("requests", "search", tenant), requests);
        assert_eq!(value("prompt_tokens", "search", tenant), sum("/usage/prompt_tokens", of.clone()));
        assert_eq!(value("prompt_tokens_cached", "search", tenant), sum("/kv/reused", of));
    }
    assert!(value("prompt_tokens_cached", "search", "alice") > 0);
    for path in ["/v1/completions", "/v1/responses"] {
        assert_eq!(value("requests", path, "bob"), 1);
    }
    assert_eq!(metrics.matches("kvserve:label_requests_total{").count(), 4, "{metrics}");
}

#[test]
fn tenants_share_no_prefix_with_full_attention() {
    let mut keys = ApiKeys::default();
    assert!(keys.add("key-a", "alice") && keys.add("key-b", "bob"));
    let server = with(None, ServerConfig { keys: Some(keys), ..free_port() });
    assert_eq!(reused(&ask(&server, "key-a", json!({}))), 0);
    assert!(reused(&ask(&server, "key-a", json!({}))) > 0);
    assert_eq!(reused(&ask(&server, "key-b", json!({}))), 0);
    assert_eq!(reused(&ask(&server, "key-b", json!({"cache_salt": "alice"}))), 0);
}

#[test]
fn a_salt_divides_what_a_tenant_has() {
    let server = server();
    let plain = || reused(&ask(&server, "key-a", json!({})));
    let salted = |salt: &str| reused(&ask(&server, "key-a", json!({"cache_salt": salt})));
    assert_eq!(plain(), 0);
    assert_eq!(salted("one"), 0);
    assert_eq!(salted("two"), 0);
    let found = plain();
    assert!(found > 0);
    assert_eq!((salted("one"), salted("two")), (found, found));
    // The same salt of another tenant is another salt.
    assert_eq!(reused(&ask(&server, "key-b", json!({"cache_salt": "one"}))), 0);
    // A label is not a salt.
    assert_eq!(reused(&ask(&server, "key-a", json!({"prompt_cache_key": "one"}))), found);
}

#[rstest]
#[case::none(&[])]
#[case::empty(&[("authorization", "Bearer ")])]
#[case::wrong(&[("authorization", "Bearer key-c")])]
#[case::prefix(&[("authorization", "Bearer key-")])]
#[case::scheme(&[("authorization", "Basic key-a")])]
#[case::bare(&[("authorization", "key-a")])]
#[case::own(&[("x-api-key", "nobody")])]
fn a_missing_or_unknown_key_is_refused(#[case] headers: &[(&str, &str)]) {
    let server = server();
    for (method, path) in [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v2/chat"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/documents"),
        ("GET", "/v1/documents/a"),
        ("PUT", "/v1/documents/a"),
        ("DELETE", "/v1/documents/a"),
        ("GET", "/v1/models/tiny-rag"),
        ("GET", "/overview"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/is_sleeping"),
    ] {
        let body = if method == "POST" { b"{}".as_slice() } else { b"" };
        let answer = call(server.address(), method, path, headers, body);
        assert_eq!(answer.status, 401, "{path}: {answer:?}");
        let said = answer.json();
        let kind = said["error"]["type"].as_str();
        // Cohere's errors have a message alone.
        assert!(
            kind == Some("authentication_error") || path == "/v2/chat" && said["message"].is_string(),
            "{path}"
        );
    }
    for path in ["/health", "/version"] {
        assert_eq!(call(server.address(), "GET", path, headers, b"").status, 200);
    }
}

#[test]
fn a_key_may_come_in_either_header() {
    let server = server();
    for header in [("authorization", "bearer key-a"), ("x-api-key", "key-a")] {
        assert_eq!(call(server.address(), "GET", "/v1/models", &[header], b"").status, 200);
    }
}

#[test]
fn only_the_operator_sees_counts_and_controls_the_caches() {
    let server = server();
    assert_eq!(reused(&ask(&server, "key-a", json!({}))), 0);
    for (method, path) in [
        ("GET", "/metrics"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
    ] {
        let state = || {
            let state = |engine: &mut kvengine::Engine| {
                (engine.is_sleeping(kvengine::PoolTag::KvCache), engine.report().main.map(|pool| pool.cached))
            };
            server.with_engine(state).unwrap()
        };
        let before = state();
        let tenant = call(server.address(), method, path, &[("x-api-key", "key-a")], b"");
        assert_eq!(state(), before, "{path}: a refused call does nothing");
        assert_eq!(
            (tenant.status, &tenant.json()["error"]["type"]),
            (403, &json!("permission_error")),
            "{path}"
        );
        let operator = call(server.address(), method, path, &[("x-api-key", "key-op")], b"");
        assert_eq!(operator.status, 200, "{path}: {operator:?}");
    }
}

#[test]
fn a_file_has_a_key_and_a_tenant_in_each_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        ApiKeys::read(&path)
    };
    let keys = read("# keys\n\nkey-a alice\n  key-b\tbob  \nkey-c alice\n").unwrap();
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), ..free_port() });
    assert_eq!(reused(&ask(&server, "key-a", json!({}))), 0);
    assert!(reused(&ask(&server, "key-c", json!({}))) > 0);
    assert_eq!(reused(&ask(&server, "key-b", json!({}))), 0);
    for (text, words) in [
        ("secret", "line 1: it does not have two words"),
        ("a b\nsecret b c", "line 2: it does not have two words"),
        ("secret alice\nsecret bob", "line 2: this key occurs twice"),
        ("secret chunk_cache", "line 1: this name belongs to the default tenant"),
        ("# nothing\n", "has no keys"),
        ("cl\u{e9} alice", "line 1: the key has characters that no HTTP header may have"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("secret"), "{error}");
    }
    let error = ApiKeys::read(&folder.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("cannot read the keys"), "{error}");
}
