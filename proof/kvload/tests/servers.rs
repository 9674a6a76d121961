//! The client against servers that are right, wrong, or gone.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread::{JoinHandle, spawn};

use kvlab::Arrival;
use kvload::{Error, Target, model_names, play};

/// Starts a server that answers the given number of connections, each with the same bytes, and returns its target and the
/// bodies that it reads.
fn serve(connections: usize, answer: &'static str) -> (Target, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let served =
        spawn(move || (0..connections).map(|_| answered(listener.accept().unwrap().0, answer)).collect());
    (Target { url, model: "m".to_owned(), vocabulary: 50, limit: 100 }, served)
}

/// Reads a request, answers it, and returns its body.
fn answered(stream: TcpStream, answer: &str) -> String {
    let mut reader = BufReader::new(stream);
    let (mut length, mut line) = (0, String::new());
    while reader.read_line(&mut line).unwrap() > 2 {
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    reader.get_mut().write_all(answer.as_bytes()).unwrap();
    String::from_utf8(body).unwrap()
}

fn arrivals(prompts: &[usize]) -> Vec<Arrival> {
    prompts.iter().map(|&prompt_tokens| Arrival { at: 0.0, prompt_tokens, answer_tokens: 3 }).collect()
}

const STREAM: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n: a comment\n\n\
    data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}],\"usage\":null}\n\n\
    data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":null}]}\n\n\
    data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n\
    data: [DONE]\n\n";

#[test]
fn answers_are_counted_as_the_server_says() {
    let (target, served) = serve(2, STREAM);
    let report = play(&target, &arrivals(&[5, 6]), 2, 1, &mut |_, _| ()).unwrap();
    assert_eq!((report.requests, report.failed, report.shortened), (2, 0, 2));
    assert_eq!((report.prompt_tokens, report.answer_tokens, report.cached_tokens), (15, 4, 8));
    assert_eq!(report.ttft_ms.len(), 2);
    let mut lengths: Vec<usize> = served
        .join()
        .unwrap()
        .iter()
        .map(|body| {
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(
                (&body["model"], &body["max_tokens"], &body["stream"]),
                (&"m".into(), &3.into(), &true.into())
            );
            body["prompt"].as_array().unwrap().len()
        })
        .collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [7, 8]);
}

#[test]
fn a_request_that_fails_is_counted_and_the_others_go_on() {
    let (target, served) = serve(1, STREAM);
    // The second prompt is too long to be sent.
    let report = play(&target, &arrivals(&[5, 500]), 0, 1, &mut |_, _| ()).unwrap();
    assert_eq!((report.requests, report.failed, report.answer_tokens), (2, 1, 2));
    assert!(report.first_failure.unwrap().contains("limit of 100"));
    served.join().unwrap();
}

#[test]
fn a_server_that_refuses_fails_or_is_gone_is_an_error() {
    let play = |target: &Target| play(target, &arrivals(&[5]), 0, 1, &mut |_, _| ()).unwrap_err();
    let (target, _served) = serve(1, "HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy");
    assert!(matches!(play(&target), Error::Status { status: 429, body } if body == "busy"));
    let (target, _served) =
        serve(1, "HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\ndata: {\"error\":\"gone\"}");
    assert!(matches!(play(&target), Error::Connection(_) | Error::Stream(_)));
    let (target, _served) =
        serve(1, "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {\"error\":\"gone\"}\n\n");
    assert!(matches!(play(&target), Error::Stream(reason) if reason.contains("gone")));
    let (target, _served) = serve(1, "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: nothing\n\n");
    assert!(matches!(play(&target), Error::Json { .. }));
    let (target, served) = serve(0, "");
    served.join().unwrap();
    assert!(matches!(play(&target), Error::Connect { .. }));
}

#[test]
fn the_names_of_models_are_read() {
    let list = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{\"data\": [{\"id\": \"a\"}, {\"id\": \"b\"}]}";
    let (target, served) = serve(1, list);
    assert_eq!(model_names(&target.url).unwrap(), ["a", "b"]);
    served.join().unwrap();
}
