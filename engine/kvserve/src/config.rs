//! The settings of a server.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvchunk::Reuse;
use kvengine::{Engine, LibraryLimits};
use kvmodel::TextCodec;

use crate::tenants::ApiKeys;

/// The model that a server answers with.
#[derive(Debug)]
pub struct ServedModel {
    /// The engine.
    pub engine: Engine,
    /// The tokenizer and the chat template.
    pub codec: TextCodec,
    /// The names of the model in requests. The first one stands in answers.
    pub names: Vec<String>,
    /// The reuse of documents. `None` answers by full attention, where only the beginning of a prompt is reused.
    pub reuse: Option<DocumentReuse>,
}

/// The reuse of documents at any position.
#[derive(Debug, Clone)]
pub struct DocumentReuse {
    /// The settings, which were measured for the model or chosen by the operator.
    pub settings: Reuse,
    /// The decoys for modes that have some, as tokens.
    pub decoys: Arc<[Vec<u32>]>,
}

/// The settings of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The address to listen on. Port 0 chooses a free port.
    pub address: SocketAddr,
    /// The keys of the clients. `None` lets everybody in, as the default tenant.
    pub keys: Option<ApiKeys>,
    /// The file in which registered documents outlive the server. `None` keeps them in memory alone.
    pub documents: Option<PathBuf>,
    /// The origins of web pages that may use the server, such as `https://app.example`. `*` stands for all pages and needs
    /// keys.
    pub origins: Vec<String>,
    /// The limits on requests.
    pub limits: Limits,
}

impl Default for ServerConfig {
    /// Returns settings for clients on the same machine.
    fn default() -> Self {
        Self {
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8000),
            keys: None,
            documents: None,
            origins: Vec::new(),
            limits: Limits::default(),
        }
    }
}

/// The limits on requests, which keep a server alive among careless and hostile clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of a request's body, in bytes.
    pub body_bytes: usize,
    /// The maximum number of requests that are answered or wait at the same time. Others get the status 429.
    pub requests: usize,
    /// The maximum number of tokens per answer; `None` for as many as the model's context has room for.
    pub answer_tokens: Option<usize>,
    /// The maximum number of answers (`n`) per request.
    pub samples: usize,
    /// The maximum number of registered documents per tenant. With 0, prompts are not searched for any.
    pub documents: usize,
    /// The maximum number of bytes in the IDs, titles and texts of a tenant's registered documents.
    pub document_bytes: usize,
    /// The time after which an answer ends with an error; `None` for no limit.
    pub answer_time: Option<Duration>,
    /// The time in which a client must send the head of a request, and then its body.
    pub receive_time: Duration,
    /// The time for which a client may leave an answer unread before it is cancelled and the connection is closed.
    pub send_time: Duration,
    /// The maximum number of open connections. Others wait until one is closed.
    pub connections: usize,
    /// The time that a shutdown gives to running answers, and to clients that have sent a part of a request, before it ends
    /// them.
    pub shutdown_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            requests: 1024,
            answer_tokens: None,
            samples: 128,
            documents: LibraryLimits::default().documents,
            document_bytes: LibraryLimits::default().bytes,
            answer_time: None,
            receive_time: Duration::from_secs(60),
            send_time: Duration::from_secs(120),
            connections: 16_384,
            // Container systems kill after 30 seconds.
            shutdown_time: Duration::from_secs(25),
        }
    }
}
