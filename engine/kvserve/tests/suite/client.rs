//! A small HTTP client: it sends bytes as they are given, so that it can also misbehave.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    /// Returns the data of all events of a stream.
    pub(crate) fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

/// A connection to the server.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(BufReader::new(stream))
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    /// Sends a request with a body.
    pub(crate) fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        for (name, value) in headers {
            head.extend([name, ": ", value, "\r\n"]);
        }
        if !body.is_empty() || method == "POST" {
            head.extend(["content-length: ", &body.len().to_string(), "\r\n"]);
            if !headers.iter().any(|(name, _)| *name == "content-type") {
                head += "content-type: application/json\r\n";
            }
        }
        head += "\r\n";
        // The server may refuse before it has read everything.
        let _ = self.0.get_mut().write_all(&[head.as_bytes(), body].concat());
    }

    /// Reads the head of a response: its status and headers.
    pub(crate) fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let status = self.line().split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(':') else { return (status, headers) };
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    /// Reads a response.
    pub(crate) fn answer(&mut self) -> Answer {
        let (status, headers) = self.head();
        let find = |name: &str| headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        let mut body = Vec::new();
        if let Some((_, length)) = find("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.0.read_exact(&mut body).unwrap();
        } else if find("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        }
        Answer { status, headers, body: String::from_utf8(body).unwrap() }
    }

    /// Reads the next chunk of a stream, or `None` after the last one.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(self.line().trim(), 16).unwrap();
        let mut chunk = vec![0; length];
        self.0.read_exact(&mut chunk).unwrap();
        self.line();
        (length > 0).then_some(chunk)
    }

    /// Reads what the server still sends until it closes the connection.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        // A connection may also be reset.
        let _ = self.0.read_to_end(&mut all);
        all
    }

    /// Returns true if the server closes the connection without another byte.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        match self.0.read(&mut byte) {
            Ok(count) => count == 0,
            // A connection that stays open is read until the time is over.
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

/// Sends one request on a connection of its own.
pub(crate) fn call(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut client = Client::new(address);
    client.request(method, path, headers, body);
    client.answer()
}

/// Posts JSON.
pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    call(address, "POST", path, &[], body.to_string().as_bytes())
}

/// Gets a path.
pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    call(address, "GET", path, &[], b"")
}
