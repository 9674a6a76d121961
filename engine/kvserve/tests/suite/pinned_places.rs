//! Pinned documents whose keys hold only for some prompts: those of some lengths, or with the document at one position.

use std::path::Path;

use kvchunk::{Reuse, ReuseCell};
use kvmodel::{ModelDirectory, WeightFormat};
use kvserve::{DocumentReuse, Server};
use serde_json::{Value, json};

use super::client::{call, post};
use super::common::{DOCUMENTS, QUESTION, SYSTEM, assert_nothing_is_held, free_port, loaded, reuse};
use super::pins::{is_pinned, path, pinned, put, wait_until, with_model};

/// The number of positions from which the frequencies of the model depend on the length of a request.
const ORIGINAL: usize = 256;

/// Loads the built-in model with frequencies that depend on the length of a request (dynamic NTK).
fn dynamic() -> ModelDirectory {
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(built_in.join(name), folder.path().join(name)).unwrap();
    }
    let config = std::fs::read_to_string(built_in.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = json!(ORIGINAL);
    config["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 4.0});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    ModelDirectory::load(folder.path(), WeightFormat::default(), &mut |_, _| ()).unwrap()
}

/// Asks with documents in this order for an answer of up to so many tokens. Returns where the keys and values of each came
/// from.
fn sources(server: &Server, documents: &[usize], max_tokens: usize) -> Vec<String> {
    let texts: String = documents.iter().map(|&at| DOCUMENTS[at].1).collect();
    let messages = [("system", SYSTEM.to_owned()), ("user", format!("{texts}{}", QUESTION.0))];
    let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
    let ask = json!({"messages": messages, "max_tokens": max_tokens});
    let answer = post(server.address(), "/v1/chat/completions", &ask).json();
    let parts = answer["kv"]["parts"].as_array().unwrap_or_else(|| panic!("{answer}"));
    parts.iter().map(|part| part["source"].as_str().unwrap().to_owned()).collect()
}

/// Asks with documents of which each takes as much memory as one of the demo, and pushes out what is not pinned.
fn flood(server: &Server) {
    for number in 0..8 {
        let text = format!("cedo is {number} . {}", "bora is red . ".repeat(8));
        let messages = [("system", SYSTEM), ("user", QUESTION.0)];
        let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
        let ask =
            json!({"messages": messages, "documents": [{"id": "other", "text": text}], "max_tokens": SHORT});
        assert_eq!(post(server.address(), "/v1/chat/completions", &ask).status, 200);
    }
}

/// Checks that documents stay in memory where such a prompt used them last.
fn assert_pinned_there(server: &Server, documents: &[usize], max_tokens: usize) {
    // A document is pinned soon after the first token of the answer.
    let stays = || {
        flood(server);
        sources(server, documents, max_tokens).iter().all(|source| source == "cache")
    };
    assert!((0..20).any(|_| stays()), "{documents:?}, {max_tokens} tokens");
}

/// The lengths of answers with which all requests have the original frequencies, or others.
const SHORT: usize = 2;
const LONG: usize = ORIGINAL + 1;

#[test]
fn a_document_is_pinned_with_the_frequencies_of_the_last_prompt() {
    let server = with_model(dynamic, reuse(), (2, true), free_port());
    (0..3).for_each(|at| put(&server, at, json!({})));
    for max_tokens in [SHORT, LONG, LONG + 1, SHORT] {
        assert_eq!(sources(&server, &[0], max_tokens), ["computed"], "{max_tokens} tokens");
        assert_pinned_there(&server, &[0], max_tokens);
    }
    assert_eq!(
        sources(&server, &[0], SHORT + 1),
        ["cache"],
        "the original frequencies are those of many lengths"
    );
    assert_eq!(call(server.address(), "DELETE", &path(0), &[], b"").status, 200);
    assert_nothing_is_held(&server);
}

#[test]
fn a_document_with_a_system_prompt_is_pinned_with_the_original_frequencies() {
    let server = with_model(dynamic, reuse(), (2, true), free_port());
    (1..3).for_each(|at| put(&server, at, json!({})));
    pinned(&server);
    assert_eq!(sources(&server, &[0], LONG), ["computed"]);
    flood(&server);
    assert_eq!(sources(&server, &[0], SHORT), ["cache"]);
    flood(&server);
    assert_eq!(sources(&server, &[0], LONG), ["computed"]);
}

#[test]
fn documents_of_a_long_prompt_are_pinned_again_after_sleep_when_others_of_it_have_been_removed() {
    let overlapped = Reuse::plain(ReuseCell::OVERLAPPED_WITH_SYSTEM);
    let reuse = DocumentReuse { settings: overlapped, decoys: [].into() };
    let server = with_model(dynamic, reuse, (6, true), free_port());
    (0..3).for_each(|at| put(&server, at, json!({})));
    sources(&server, &[0, 1, 2], LONG);
    wait_until("they are never pinned", || (0..3).all(|at| is_pinned(&server, at)));
    assert_eq!(call(server.address(), "DELETE", &path(0), &[], b"").status, 200);
    for control in ["/sleep", "/wake_up"] {
        assert_eq!(post(server.address(), control, &json!({})).status, 200);
    }
    assert_eq!([1, 2].map(|at| is_pinned(&server, at)), [true; 2]);
    assert_eq!(sources(&server, &[1, 2], LONG).len(), 2);
}

#[test]
fn a_document_that_is_found_at_one_position_alone_is_pinned_where_the_last_prompt_had_it() {
    let absolute = Reuse::plain(ReuseCell::ABSOLUTE_WITH_SYSTEM);
    let reuse = DocumentReuse { settings: absolute, decoys: [].into() };
    let server = with_model(loaded, reuse, (4, true), free_port());
    (0..3).for_each(|at| put(&server, at, json!({})));
    assert_pinned_there(&server, &[0], SHORT);
    assert_eq!(sources(&server, &[2, 0], SHORT)[1], "computed", "behind another document");
    assert_pinned_there(&server, &[2, 0], SHORT);
    flood(&server);
    assert_eq!(sources(&server, &[0], SHORT), ["computed"], "the copy at the first position");
}

#[test]
fn a_document_at_one_position_is_pinned_after_sleep_where_it_was_or_not_at_all() {
    let absolute = Reuse::plain(ReuseCell::ABSOLUTE_WITH_SYSTEM);
    let reuse = DocumentReuse { settings: absolute, decoys: [].into() };
    let server = with_model(loaded, reuse, (8, true), free_port());
    let sleep_and_wake = || {
        for control in ["/sleep", "/wake_up"] {
            assert_eq!(post(server.address(), control, &json!({})).status, 200);
        }
    };
    // Documents that a request names are not pinned.
    let leave_a_copy_at_the_first_position = || {
        let messages = [("system", SYSTEM), ("user", QUESTION.0)];
        let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
        let documents = [json!({"id": "other", "text": DOCUMENTS[0].1})];
        let ask = json!({"messages": messages, "documents": documents, "max_tokens": SHORT});
        assert_eq!(post(server.address(), "/v1/chat/completions", &ask).status, 200);
    };
    leave_a_copy_at_the_first_position();
    for at in [0, 2] {
        put(&server, at, json!({}));
    }
    // The ID of the second document is less than that of the first one.
    sources(&server, &[2, 0], SHORT);
    wait_until("they are never pinned", || [2, 0].into_iter().all(|at| is_pinned(&server, at)));
    sleep_and_wake();
    assert_eq!([2, 0].map(|at| is_pinned(&server, at)), [true; 2]);
    flood(&server);
    assert_eq!(sources(&server, &[2, 0], SHORT), ["cache"; 2], "the copies of the prompt");
    leave_a_copy_at_the_first_position();
    assert_eq!(call(server.address(), "DELETE", &path(2), &[], b"").status, 200);
    sleep_and_wake();
    assert!(!is_pinned(&server, 0), "the copy at another position is pinned");
    assert_eq!(sources(&server, &[0], SHORT), ["cache"], "the copy was lost, so this shows nothing");
    wait_until("the next prompt does not pin it", || is_pinned(&server, 0));
    assert_eq!(call(server.address(), "DELETE", &path(0), &[], b"").status, 200);
    assert_nothing_is_held(&server);
}
