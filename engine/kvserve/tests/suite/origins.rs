//! Servers without keys and web pages: a page of another site can neither control nor read them.

use kvserve::{ApiKeys, Server, ServerConfig};
use serde_json::json;

use crate::client::{Answer, Client, call};
use crate::common::{free_port, question, server, with};

const PAGE: &str = "https://app.example";
const CHAT: &str = "/v1/chat/completions";

/// Starts a server that pages of these origins may use.
fn allowing(origins: &[&str], keys: Option<ApiKeys>) -> Server {
    let origins = origins.iter().map(|&origin| origin.to_owned()).collect();
    with(None, ServerConfig { origins, keys, ..free_port() })
}

fn operator() -> ApiKeys {
    let mut keys = ApiKeys::default();
    keys.add("key", "operator");
    keys
}

/// Asks as a browser does before a page's request, with the headers that clients send.
fn preflight(server: &Server, origin: &str, method: &str, path: &str) -> Answer {
    let headers = [
        ("origin", origin),
        ("access-control-request-method", method),
        ("access-control-request-headers", HEADERS),
    ];
    call(server.address(), "OPTIONS", path, &headers, b"")
}

/// The headers that clients of the dialects send in a browser.
const HEADERS: &str = "anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,x-api-key,\
                       x-stainless-arch,x-stainless-lang,x-stainless-retry-count,x-stainless-timeout";

fn allowed(answer: &Answer) -> Option<&str> {
    answer.header("access-control-allow-origin")
}

#[test]
fn pages_of_others_cannot_use_a_server_without_keys() {
    let server = server();
    let foreign = [("origin", "https://example.com")];
    for (method, path) in [
        ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/overview"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/documents/a"),
        ("POST", "/v1/messages"),
    ] {
        let answer = call(server.address(), method, path, &foreign, b"");
        assert_eq!(answer.status, 403, "{path}: {answer:?}");
        assert!(answer.body.contains("https://example.com"), "{answer:?}");
    }
    let awake = call(server.address(), "GET", "/is_sleeping", &[], b"").json();
    assert_eq!(awake["is_sleeping"], false);
    // The server's own page may.
    assert_eq!(
        call(server.address(), "POST", "/reset_prefix_cache", &[("origin", "http://localhost")], b"").status,
        200
    );
    // A name that leads to this machine without being its own.
    let mut client = Client::new(server.address());
    client.send(b"GET /overview HTTP/1.1\r\nhost: rebound.example\r\n\r\n");
    let answer = client.answer();
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (403, &json!("permission_error")));
}

#[test]
fn with_keys_the_key_decides() {
    let server = with(None, ServerConfig { keys: Some(operator()), ..free_port() });
    let foreign = ("origin", "https://example.com");
    assert_eq!(
        call(server.address(), "GET", "/v1/models", &[foreign, ("x-api-key", "key")], b"").status,
        200
    );
    assert_eq!(call(server.address(), "GET", "/v1/models", &[foreign], b"").status, 401);
}

#[test]
fn browsers_are_told_that_the_pages_of_an_allowed_origin_may_use_the_server() {
    let server = allowing(&["http://localhost:3000", PAGE], None);
    for (method, path) in
        [("POST", CHAT), ("POST", "/v1/messages"), ("PUT", "/v1/documents/a"), ("DELETE", "/v1/documents/a")]
    {
        let told = preflight(&server, PAGE, method, path);
        assert_eq!((told.status, allowed(&told)), (200, Some(PAGE)), "{told:?}");
        assert!(
            told.header("access-control-allow-methods").is_some_and(|all| all.contains(method)),
            "{told:?}"
        );
        assert_eq!(told.header("access-control-allow-headers"), Some(HEADERS), "{told:?}");
        assert!(told.header("access-control-max-age").is_some() && told.body.is_empty(), "{told:?}");
        assert!(told.header("vary").is_some_and(|vary| vary.contains("origin")), "{told:?}");
    }
    // Credentials are keys in headers, and never cookies.
    assert_eq!(preflight(&server, PAGE, "POST", CHAT).header("access-control-allow-credentials"), None);
    let foreign = preflight(&server, "https://example.com", "POST", CHAT);
    assert_eq!((foreign.status, allowed(&foreign)), (403, None), "{foreign:?}");
}

#[test]
fn pages_of_an_allowed_origin_read_answers_streams_and_errors() {
    let server = allowing(&[PAGE], None);
    let ask = |origin: &str, path: &str, body: &str| {
        call(server.address(), "POST", path, &[("origin", origin)], body.as_bytes())
    };
    let whole = ask(PAGE, CHAT, &question(json!({})).to_string());
    assert_eq!((whole.status, allowed(&whole)), (200, Some(PAGE)), "{whole:?}");
    let exposed = whole.header("access-control-expose-headers").unwrap();
    for name in ["x-request-id", "request-id", "retry-after", "x-should-retry"] {
        assert!(exposed.split(',').any(|one| one.trim() == name), "{exposed}");
    }
    let streamed = ask(PAGE, CHAT, &question(json!({"stream": true})).to_string());
    assert_eq!((streamed.status, allowed(&streamed)), (200, Some(PAGE)), "{streamed:?}");
    assert!(streamed.body.ends_with("data: [DONE]\n\n"), "{streamed:?}");
    for (path, status) in [(CHAT, 400), ("/v1/messages", 400), ("/v2/chat", 400), ("/none", 404)] {
        let refused = ask(PAGE, path, "{\"wrong\": 1}");
        assert_eq!((refused.status, allowed(&refused)), (status, Some(PAGE)), "{path}: {refused:?}");
    }
    let foreign = ask("https://example.com", CHAT, &question(json!({})).to_string());
    assert_eq!((foreign.status, allowed(&foreign)), (403, None), "{foreign:?}");
    // A program sends no origin, and the server's own page is of its own.
    for headers in [&[][..], &[("origin", "http://localhost")]] {
        let own = call(server.address(), "GET", "/v1/models", headers, b"");
        assert_eq!((own.status, allowed(&own)), (200, None), "{own:?}");
    }
}

#[test]
fn with_keys_every_page_may_be_allowed() {
    let server = allowing(&["*"], Some(operator()));
    let told = preflight(&server, PAGE, "POST", CHAT);
    assert_eq!((told.status, allowed(&told)), (200, Some("*")), "a browser sends no key with this question");
    let get = |server: &Server, more: &[(&str, &str)]| {
        call(server.address(), "GET", "/v1/models", &[&[("origin", PAGE)], more].concat(), b"")
    };
    let (keyless, keyed) = (get(&server, &[]), get(&server, &[("authorization", "Bearer key")]));
    assert_eq!((keyless.status, allowed(&keyless)), (401, Some("*")), "{keyless:?}");
    assert_eq!((keyed.status, allowed(&keyed)), (200, Some("*")), "{keyed:?}");
    // Of some origins, the others are answered by key, and their pages cannot read the answer.
    let server = allowing(&["https://other.example"], Some(operator()));
    let unread = get(&server, &[("x-api-key", "key")]);
    assert_eq!((unread.status, allowed(&unread)), (200, None), "{unread:?}");
}
