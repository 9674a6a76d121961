//! A running `kvc serve`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A running server.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) log: BufReader<ChildStderr>,
    /// The log before the line with the address.
    pub(crate) before: String,
    pub(crate) address: String,
}

impl Serving {
    /// Starts a server on a free port, and waits until it listens.
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
        command.args([&["serve", "--port", "0"], args].concat());
        Self::of(command)
    }

    /// Starts a server with a command, and waits until it listens.
    pub(crate) fn of(mut command: Command) -> Self {
        let command = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = command.unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut serving = Self { child, log, before: String::new(), address: String::new() };
        let mut line = String::new();
        while serving.address.is_empty() {
            line.clear();
            assert!(serving.log.read_line(&mut line).unwrap() > 0, "the server ended");
            serving.before += &line;
            if let Some(address) = line.trim().strip_prefix("listening on http://") {
                address.trim_end_matches("/v1").clone_into(&mut serving.address);
            }
        }
        serving
    }

    /// Sends a request on a connection of its own.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn chat(&self, headers: &str, body: &Value) -> Value {
        let (status, text) = self.send("POST", "/v1/chat/completions", headers, &body.to_string());
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Returns the exit code and the rest of the log.
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
