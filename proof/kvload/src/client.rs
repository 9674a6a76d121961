//! An HTTP client whose connections are used again.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use crate::error::{Error, Result};
use crate::url::ServerUrl;

/// The number of attempts to connect. A server's queue of new connections may be full in a storm of them.
const ATTEMPTS: u32 = 5;
/// The pause after the first failed attempt; later ones are longer.
const PAUSE: Duration = Duration::from_millis(20);

/// Sends requests to one server. Clones share their connections.
///
/// Must be used inside a tokio runtime, whose threads read and write the connections.
#[derive(Debug, Clone)]
pub struct Client {
    url: Arc<ServerUrl>,
    key: Option<Arc<str>>,
    idle: Arc<Mutex<Vec<Connection>>>,
}

/// A connection.
///
/// # Drop behaviour
/// Closes it.
#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    task: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Client {
    /// Creates a client without connections.
    pub fn new(url: ServerUrl) -> Self {
        Self { url: Arc::new(url), key: None, idle: Arc::default() }
    }

    /// Returns a client with the same connections whose requests carry a key.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        Self { key: Some(key.into()), ..self.clone() }
    }

    /// Opens connections, so that the next requests need not wait for one.
    ///
    /// # Errors
    /// Returns [`Error::Connect`] if the server does not accept so many.
    pub async fn open(&self, connections: usize) -> Result<()> {
        let missing = connections.saturating_sub(self.idle.lock().len());
        for _ in 0..missing {
            let connection = self.connect().await?;
            self.idle.lock().push(connection);
        }
        Ok(())
    }

    /// Posts JSON.
    ///
    /// # Errors
    /// Returns the errors of [`send`](Self::send).
    pub async fn post(&self, path: &str, body: &Value) -> Result<Response> {
        self.send("POST", path, Bytes::from(body.to_string())).await
    }

    /// Gets a path.
    ///
    /// # Errors
    /// Returns the errors of [`send`](Self::send).
    pub async fn get(&self, path: &str) -> Result<Response> {
        self.send("GET", path, Bytes::new()).await
    }

    /// Sends a request, and returns once the head of its response is there. The status may be any.
    ///
    /// # Errors
    /// Returns [`Error::Connect`] if the server cannot be reached, [`Error::Connection`] if the connection ends before the
    /// head, and [`Error::Request`] if the path is malformed.
    pub async fn send(&self, method: &str, path: &str, body: Bytes) -> Result<Response> {
        let idle = self.idle.lock().pop();
        if let Some(mut connection) = idle {
            // The server may have closed a connection that was idle; then it has not read the request.
            match connection.sender.send_request(self.request(method, path, body.clone())?).await {
                Ok(response) => return Ok(Response::new(response, connection, self)),
                Err(error) if error.is_timeout() => return Err(error.into()),
                Err(_) => {}
            }
        }
        let mut connection = self.connect().await?;
        let response = connection.sender.send_request(self.request(method, path, body)?).await?;
        Ok(Response::new(response, connection, self))
    }

    fn request(&self, method: &str, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let ServerUrl { host, port, path: base } = &*self.url;
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{base}{path}"))
            .header(HOST, format!("{host}:{port}"));
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        Ok(request.body(Full::new(body))?)
    }

    async fn connect(&self) -> Result<Connection> {
        let stream = self.stream().await?;
        // A request must not wait for more of it.
        let _ = stream.set_nodelay(true);
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // What fails is also reported to the request that is being answered.
        let task = tokio::spawn(async move { drop(connection.await) }).abort_handle();
        Ok(Connection { sender, task })
    }

    /// Opens a connection for bytes that are no HTTP, or not all of it.
    ///
    /// # Errors
    /// Returns [`Error::Connect`] if the server cannot be reached.
    pub async fn stream(&self) -> Result<TcpStream> {
        let host = self.url.host.trim_matches(['[', ']']);
        let mut attempt = 1;
        loop {
            match TcpStream::connect((host, self.url.port)).await {
                Ok(stream) => return Ok(stream),
                Err(_) if attempt < ATTEMPTS => tokio::time::sleep(PAUSE * attempt).await,
                Err(source) => return Err(Error::Connect { url: (*self.url).clone(), source }),
            }
            attempt += 1;
        }
    }
}

/// A response whose head has arrived.
///
/// # Drop behaviour
/// Closes the connection, unless the body has been read to its end.
#[derive(Debug)]
pub struct Response {
    status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
    connection: Option<Connection>,
    idle: Arc<Mutex<Vec<Connection>>>,
}

impl Response {
    fn new(response: hyper::Response<Incoming>, connection: Connection, client: &Client) -> Self {
        let (head, body) = response.into_parts();
        Self {
            status: head.status,
            headers: head.headers,
            body,
            connection: Some(connection),
            idle: Arc::clone(&client.idle),
        }
    }

    /// Returns the status.
    pub fn status(&self) -> u16 {
        self.status.as_u16()
    }

    /// Returns a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Waits for the next piece of the body. Returns `None` at the end.
    ///
    /// # Errors
    /// Returns [`Error::Connection`] if the body ends early.
    pub async fn piece(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        if let Some(connection) = self.connection.take_if(|connection| !connection.sender.is_closed()) {
            self.idle.lock().push(connection);
        }
        Ok(None)
    }

    /// Waits for the whole body.
    ///
    /// # Errors
    /// Returns [`Error::Connection`] if the body ends early.
    pub async fn text(mut self) -> Result<String> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Waits for the whole body, which must be JSON.
    ///
    /// # Errors
    /// Returns [`Error::Json`] if it is not, and [`Error::Connection`] if the body ends early.
    pub async fn json(self) -> Result<Value> {
        let text = self.text().await?;
        serde_json::from_str(&text).map_err(|source| Error::Json { text, source })
    }

    /// Returns the response if its status is 200.
    ///
    /// # Errors
    /// Returns [`Error::Status`] with the body for every other status.
    pub async fn ok(self) -> Result<Self> {
        if self.status == StatusCode::OK {
            return Ok(self);
        }
        let status = self.status();
        Err(Error::Status { status, body: self.text().await? })
    }

    /// Returns the body as server-sent events.
    pub fn events(self) -> Events {
        Events { response: self, buffer: BytesMut::new() }
    }
}

/// The events of a stream.
#[derive(Debug)]
pub struct Events {
    response: Response,
    buffer: BytesMut,
}

impl Events {
    /// Waits for the data of the next event. Each line of data counts as an event, because the dialects of models write
    /// only one.
    ///
    /// # Errors
    /// Returns [`Error::Connection`] if the stream ends early.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let mut line = self.buffer.split_to(end + 1).freeze();
                if line.starts_with(b"data:") {
                    line.advance(b"data:".len());
                    let blank = line.iter().take_while(|&&byte| byte == b' ').count();
                    line.advance(blank);
                    line.truncate(line.trim_ascii_end().len());
                    return Ok(Some(line));
                }
            }
            match self.response.piece().await? {
                Some(piece) => self.buffer.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }
}
