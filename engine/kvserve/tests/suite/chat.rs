//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::client::{Answer, Client, post};
use crate::common::{QUESTION, assert_nothing_is_held, question, server};

const PATH: &str = "/v1/chat/completions";

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

/// Returns the text of a sample in a stream.
fn streamed(answer: &Answer, index: usize) -> String {
    let events = answer.events();
    let choices = events.iter().filter_map(|event| event["choices"].get(0));
    let own = choices.filter(|choice| choice["index"] == index);
    own.filter_map(|choice| choice["delta"]["content"].as_str().map(str::to_owned)).collect()
}

#[test]
fn a_chat_is_answered_whole_and_streamed_with_the_same_text() {
    let server = server();
    let whole = post(server.address(), PATH, &question(json!({})));
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    let choice = &whole["choices"][0];
    assert_eq!(text(&whole).trim(), QUESTION.1);
    assert_eq!(
        (&whole["object"], &choice["message"]["role"]),
        (&json!("chat.completion"), &json!("assistant"))
    );
    assert_eq!(choice["finish_reason"], "stop");

    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let stream = post(server.address(), PATH, &question(options));
    assert_eq!(stream.header("content-type"), Some("text/event-stream"));
    assert!(stream.body.ends_with("data: [DONE]\n\n"), "{}", stream.body);
    let events = stream.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(streamed(&stream, 0), text(&whole));
    let (usage, finish) = (events.last().unwrap(), &events[events.len() - 2]);
    assert_eq!(finish["choices"][0]["finish_reason"], choice["finish_reason"]);
    assert_eq!(usage["choices"], json!([]));
    let others = &events[..events.len() - 1];
    assert!(others.iter().all(|event| event.get("usage") == Some(&Value::Null)), "{others:?}");
    assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    // The whole answer came first, and left the prompt's whole blocks in the cache.
    let cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 0 && cached.is_multiple_of(16), "{usage}");
    assert_eq!(finish["kv"]["reused"], cached);
    assert_nothing_is_held(&server);
}

#[test]
fn several_answers_have_their_own_seeds_and_indices() {
    let server = server();
    let several = json!({"n": 3, "temperature": 2.0, "seed": 5, "max_tokens": 20, "ignore_eos": true});
    let whole = post(server.address(), PATH, &question(several.clone())).json();
    let texts = |answer: &Value| {
        let choices = answer["choices"].as_array().unwrap().iter();
        choices.map(|choice| choice["message"]["content"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(texts(&whole).len(), 3);
    assert!(texts(&whole).iter().any(|text| *text != texts(&whole)[0]), "{whole}");
    let again = post(server.address(), PATH, &question(several.clone())).json();
    assert_eq!(texts(&again), texts(&whole), "the same seed");
    let mut stream = several;
    stream["stream"] = json!(true);
    let stream = post(server.address(), PATH, &question(stream));
    for (index, text) in texts(&whole).iter().enumerate() {
        assert_eq!(streamed(&stream, index), *text, "{index}");
    }
    let ends =
        stream.events().iter().filter(|event| event["choices"][0]["finish_reason"].is_string()).count();
    assert_eq!(ends, 3);
    // Without a seed, each request has one of its own.
    let hot = json!({"temperature": 2.0, "max_tokens": 20, "ignore_eos": true});
    let hot = || text(&post(server.address(), PATH, &question(hot.clone())).json()).to_owned();
    assert_ne!(hot(), hot());
}

#[test]
fn an_answer_ends_before_a_stop_string() {
    let server = server();
    let long = json!({"ignore_eos": true, "max_tokens": 24});
    let whole = post(server.address(), PATH, &question(long.clone())).json();
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 24);
    let whole = text(&whole).to_owned();
    let words: Vec<&str> = whole.split_whitespace().collect();
    let stop = words.iter().skip(2).find(|word| !words[0].contains(**word)).unwrap();
    let before = &whole[..whole.find(stop).unwrap()];
    for given in [json!(stop), json!([stop]), json!(["never", stop])] {
        let mut request = question(long.clone());
        request["stop"] = given;
        let answer = post(server.address(), PATH, &request).json();
        assert_eq!((text(&answer), &answer["choices"][0]["finish_reason"]), (before, &json!("stop")));
        assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 24);
        request["stream"] = json!(true);
        assert_eq!(streamed(&post(server.address(), PATH, &request), 0), before);
    }
}

#[test]
fn log_probabilities_belong_to_the_tokens_of_the_text() {
    let server = server();
    let asked = json!({"logprobs": true, "top_logprobs": 3});
    let whole = post(server.address(), PATH, &question(asked.clone())).json();
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(joined.trim(), text(&whole).trim());
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["logprob"]), (3, &token["logprob"]), "the likeliest was chosen");
        let sum: f64 = top.iter().map(|one| one["logprob"].as_f64().unwrap().exp()).sum();
        assert!(sum > 0.0 && sum <= 1.0 + 1e-6, "{top:?}");
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(bytes, token["token"].as_str().unwrap().as_bytes());
    }
    let mut stream = asked;
    stream["stream"] = json!(true);
    let stream = post(server.address(), PATH, &question(stream));
    let events = stream.events();
    let parts = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(parts.flatten().count(), tokens.len());
    let without = post(server.address(), PATH, &question(json!({}))).json();
    assert_eq!(without["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn a_bias_and_penalties_change_the_answer() {
    let server = server();
    let plain = post(server.address(), PATH, &question(json!({}))).json();
    let token = {
        let ask = json!({"model": "tiny-rag", "prompt": " red", "add_special_tokens": false});
        post(server.address(), "/tokenize", &ask).json()["tokens"][0].as_u64().unwrap()
    };
    let mut bias = serde_json::Map::new();
    bias.insert(token.to_string(), json!(-100));
    let other = post(server.address(), PATH, &question(json!({"logit_bias": bias}))).json();
    assert_eq!(text(&plain).trim(), "red");
    assert_ne!(text(&other).trim(), "red");
    let long = |more: Value| {
        let warm = json!({"ignore_eos": true, "max_tokens": 40, "temperature": 1.5, "seed": 1});
        let mut request = question(warm);
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        text(&post(server.address(), PATH, &request).json()).to_owned()
    };
    let before = long(json!({}));
    for penalty in [
        json!({"frequency_penalty": 2.0}),
        json!({"presence_penalty": 2.0}),
        json!({"repetition_penalty": 1.8}),
    ] {
        assert_ne!(long(penalty.clone()), before, "{penalty}");
    }
}

#[test]
fn the_beginning_of_an_answer_is_continued() {
    let server = server();
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let asked = |more: Value| {
        let mut request = json!({"messages": messages, "max_tokens": 2, "temperature": 0});
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        post(server.address(), PATH, &request)
    };
    assert_eq!(asked(json!({})).status, 200);
    assert_eq!(asked(json!({"continue_final_message": true})).status, 200);
    let refused = asked(json!({"continue_final_message": false}));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("continue_final_message")));
}

#[test]
fn a_client_that_vanishes_frees_its_blocks() {
    let server = server();
    for stream in [true, false] {
        let mut request = question(json!({"ignore_eos": true, "max_tokens": 1500, "stream": stream}));
        request["n"] = json!(4);
        let mut client = Client::new(server.address());
        client.request("POST", PATH, &[], request.to_string().as_bytes());
        if stream {
            assert_eq!(client.head().0, 200);
            for _ in 0..6 {
                client.chunk().unwrap();
            }
        } else {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let before = server.with_engine(|engine| engine.report().main.unwrap()).unwrap();
        assert!(before.mutable + before.shared > 0, "the request is running: {before:?}");
        drop(client);
        let gone = (0..200).find(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let counts = server.with_engine(|engine| engine.report().main.unwrap()).unwrap();
            counts.mutable + counts.shared == 0
        });
        assert!(gone.is_some(), "a second later, the blocks are still held");
        assert_nothing_is_held(&server);
        let metrics = crate::client::get(server.address(), "/metrics").body;
        let aborted = "vllm:request_success_total{model_name=\"tiny-rag\",finished_reason=\"abort\"}";
        assert!(
            metrics.lines().any(|line| line.starts_with(aborted) && !line.ends_with(" 0.0")),
            "{metrics}"
        );
    }
}

#[test]
fn a_storm_of_vanishing_clients_leaves_nothing() {
    let server = crate::common::reusing();
    let address = server.address();
    let clients: Vec<_> = (0..8)
        .map(|client: u64| {
            std::thread::spawn(move || {
                for round in 0..12 {
                    let stays = (client + round).is_multiple_of(3);
                    let more = json!({"ignore_eos": true, "max_tokens": 40, "n": 1 + round % 3, "stream": round.is_multiple_of(2)});
                    let mut client = Client::new(address);
                    client.request("POST", PATH, &[], question(more).to_string().as_bytes());
                    if stays {
                        let answer = client.answer();
                        assert_eq!(answer.status, 200, "{answer:?}");
                    } else {
                        std::thread::sleep(std::time::Duration::from_micros(300 * round * round));
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    let gone = (0..400).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        let metrics = crate::client::get(address, "/metrics").body;
        let all = ["kvserve:requests", "vllm:num_requests_running", "vllm:num_requests_waiting"];
        // The step behind a cancellation frees the blocks.
        all.iter().all(|name| metrics.contains(&format!("{name}{{model_name=\"tiny-rag\"}} 0.0")))
    });
    assert!(gone, "two seconds later, requests are still there");
    assert_nothing_is_held(&server);
    assert_eq!(post(address, PATH, &question(json!({}))).status, 200);
}

#[test]
fn the_newer_name_of_a_limit_counts() {
    let server = server();
    let both = question(json!({"ignore_eos": true, "max_tokens": 9, "max_completion_tokens": 3}));
    assert_eq!(post(server.address(), PATH, &both).json()["usage"]["completion_tokens"], 3);
}

#[test]
fn a_client_that_vanishes_from_the_queue_leaves_it() {
    let server = crate::common::running(1);
    let gauge = |name: &str| {
        let text = crate::client::get(server.address(), "/metrics").body;
        let line = format!("{name}{{model_name=\"tiny-rag\"}} ");
        let value = text.lines().find_map(|known| known.strip_prefix(&line).map(str::to_owned));
        value.unwrap_or_else(|| panic!("{line} in {text}"))
    };
    let wait_for = |name: &str, value: &str| {
        let is_so = (0..2000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            gauge(name) == value
        });
        assert!(is_so, "{name} is {} and never {value}", gauge(name));
    };
    let mut running = Client::new(server.address());
    let long = question(json!({"ignore_eos": true, "max_tokens": 1900, "stream": true}));
    running.request("POST", PATH, &[], long.to_string().as_bytes());
    assert_eq!(running.head().0, 200);
    running.chunk().unwrap();
    for stream in [true, false] {
        let mut waiting = Client::new(server.address());
        waiting.request("POST", PATH, &[], question(json!({"stream": stream})).to_string().as_bytes());
        wait_for("vllm:num_requests_waiting", "1.0");
        drop(waiting);
        wait_for("vllm:num_requests_waiting", "0.0");
        wait_for("kvserve:requests", "1.0");
    }
    assert_eq!(gauge("vllm:num_requests_running"), "1.0", "the other one goes on");
    drop(running);
    wait_for("kvserve:requests", "0.0");
    // The next step frees the blocks.
    wait_for("vllm:num_requests_running", "0.0");
    assert_nothing_is_held(&server);
}

#[test]
fn more_answers_than_run_at_the_same_time_are_refused_by_name() {
    let server = crate::common::running(2);
    let answer = post(server.address(), PATH, &question(json!({"n": 3})));
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("n")), "{answer:?}");
    assert_eq!(post(server.address(), PATH, &question(json!({"n": 2}))).status, 200);
}
