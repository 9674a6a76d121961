//! The server: listens, answers, and shuts down.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kvengine::{Engine, LibraryLimits};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tracing::{debug, info, warn};

use crate::beginning::Frequencies;
use crate::body_memory::BodyMemory;
use crate::config::{Limits, ServedModel, ServerConfig};
use crate::descriptors;
use crate::engine_thread::EngineThread;
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::leisure::Leisure;
use crate::library::Libraries;
use crate::origin::Origins;
use crate::patient::Patient;
use crate::pins::Pins;
use crate::registrar::Registrar;
use crate::restored::restore;
use crate::routes::routes;
use crate::seats::Seats;
use crate::service::{BlockSize, Guide, Service, unix_time, unix_time_ms};
use crate::tenants::ApiKeys;
use crate::token_texts::TokenTexts;

/// The most threads that read and write connections, and decode answers.
const MOST_WORKERS: usize = 2;
/// The number of threads that tokenise prompts. More would take processors from the model.
const TOKENISERS: usize = 2;
/// The time for the last words of answers that a shutdown has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// The time to wait before accepting again after the system refused, for example for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The time between two warnings that connections cannot be accepted.
const WARN_PAUSE: Duration = Duration::from_secs(1);

/// A running server.
///
/// # Drop behaviour
/// Ends all answers and closes all connections. [`shut_down`](Self::shut_down) lets answers finish first.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    limits: Limits,
    /// True once no more connections are accepted.
    stopping: watch::Sender<bool>,
    /// True once all answers must end.
    closing: watch::Sender<bool>,
    accepting: Option<JoinHandle<()>>,
    /// `None` once the server has shut down.
    runtime: Option<Runtime>,
    _registrar: Registrar,
    // Dropped last, because answers end first.
    engine: EngineThread,
}

impl Server {
    /// Starts to answer requests with a model.
    ///
    /// # Errors
    /// Returns [`Error::Listen`] if the address is in use or not this machine's, [`Error::Limit`] and [`Error::NoName`] for
    /// settings with which nothing could be answered, [`Error::Origin`] and [`Error::AnyOrigin`] for origins that cannot be
    /// allowed, [`Error::Start`] if no threads can be started,
    /// [`Error::Engine`] if the engine's cache cannot keep tenants apart, and the errors whose names contain `Documents` if
    /// registered documents cannot be read from their file or written to it.
    pub fn start(model: ServedModel, config: ServerConfig) -> Result<Self> {
        let ServerConfig { address, keys, documents, origins, limits } = config;
        let ServedModel { engine, codec, names, reuse } = model;
        check(&names, &limits)?;
        let origins = Origins::new(&origins, keys.is_some())?;
        if let Some(keys) = &keys {
            keys.register(&engine)?;
        }
        let libraries =
            Libraries::new(LibraryLimits { documents: limits.documents, bytes: limits.document_bytes });
        let now = unix_time_ms();
        let mut journal = documents.map(|path| Journal::open(&path)).transpose()?;
        let restored = match &mut journal {
            Some(journal) => restore(journal, &libraries, keys.as_ref(), now)?,
            None => Vec::new(),
        };
        let of_model = engine.model().config();
        let (context, vocabulary) = (of_model.max_positions, of_model.vocab_size);
        let running = engine.scheduling().running;
        let tenants = keys.as_ref().map_or(1, ApiKeys::tenants);
        let guide = Guide::new(of_model.clone());
        let (workers, started) = (workers(), AtomicUsize::new(0));
        // The runtime starts its workers first.
        let thread_name = move || {
            let is_worker = started.fetch_add(1, Ordering::Relaxed) < workers;
            if is_worker { "kv-serve" } else { "kv-text" }.to_owned()
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .max_blocking_threads(TOKENISERS)
            .thread_name_fn(thread_name)
            .enable_all()
            .build()?;
        let connections = descriptors::for_connections(limits.connections);
        if connections < limits.connections {
            let (wanted, limit) = (limits.connections, connections);
            warn!(
                wanted,
                limit, "the limit on open files leaves room for fewer connections; raise it with ulimit -n"
            );
        }
        let limits = Limits { connections, ..limits };
        let listen = |source| Error::Listen { address, source };
        let listener = runtime.block_on(TcpListener::bind(address)).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let block = BlockSize::of(&engine);
        let frequencies = Frequencies::of(engine.model().config());
        let pins = Pins::new(engine.report().chunks.map_or(0, |pool| pool.total), tenants, frequencies);
        let registrar = Registrar::start(journal, runtime.handle().clone())?;
        let engine = EngineThread::start(engine)?;
        let (stopping, closing) = (watch::channel(false).0, watch::channel(false).0);
        let service = Arc::new(Service {
            engine: engine.handle(),
            codec,
            names,
            reuse,
            keys,
            limits: limits.clone(),
            metrics: Arc::default(),
            recent: Arc::default(),
            libraries,
            registrar: registrar.handle(),
            block,
            context,
            running,
            vocabulary,
            token_texts: TokenTexts::default(),
            guide,
            seats: Arc::new(Seats::new(limits.requests, tenants)),
            bodies: Arc::new(BodyMemory::new(limits.body_bytes)),
            leisure: Leisure::default(),
            pins,
            is_local: address.ip().is_loopback(),
            origins,
            closing: closing.subscribe(),
            started: unix_time(),
        });
        service.log_way();
        runtime.spawn(Arc::clone(&service).resume(restored));
        let stop = stopping.subscribe();
        let accepting = runtime.spawn(accept(listener, routes(service), limits.clone(), stop));
        Ok(Self {
            address,
            limits,
            stopping,
            closing,
            accepting: Some(accepting),
            runtime: Some(runtime),
            _registrar: registrar,
            engine,
        })
    }

    /// Returns the address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Runs `work` on the engine's thread, between two steps, and returns its result. Returns `None` if `work` panics.
    pub fn with_engine<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Option<R> {
        let handle = self.engine.handle();
        self.runtime.as_ref().and_then(|runtime| runtime.block_on(handle.call(work)).ok())
    }

    /// Answers until the process gets SIGTERM or SIGINT, then shuts down. A second signal ends all answers.
    ///
    /// # Errors
    /// Returns [`Error::Start`] if signals cannot be received.
    pub fn run_until_signal(mut self) -> Result<()> {
        let Some(runtime) = self.runtime.take() else { return Ok(()) };
        let result = runtime.block_on(async {
            let mut signals = Signals::new()?;
            signals.next().await;
            info!("shutting down; a second signal ends all answers");
            tokio::select! {
                () = self.stop() => {}
                () = signals.next() => self.end().await,
            }
            Ok(())
        });
        self.runtime = Some(runtime);
        result
    }

    /// Accepts no more requests, waits until running answers have ended, but not longer than
    /// [`Limits::shutdown_time`](crate::Limits::shutdown_time), and ends the others with an error.
    pub fn shut_down(mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.block_on(self.stop());
            self.runtime = Some(runtime);
        }
    }

    async fn stop(&mut self) {
        self.stopping.send_replace(true);
        let Some(accepting) = &mut self.accepting else { return };
        if tokio::time::timeout(self.limits.shutdown_time, accepting).await.is_err() {
            warn!("ending the answers that are still running, and the connections with unfinished requests");
            self.end().await;
        } else {
            self.accepting = None;
        }
    }

    /// Ends all answers with an error.
    async fn end(&mut self) {
        self.stopping.send_replace(true);
        self.closing.send_replace(true);
        if let Some(accepting) = self.accepting.take() {
            let _ = tokio::time::timeout(LAST_WORDS, accepting).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.block_on(self.end());
            runtime.shutdown_timeout(LAST_WORDS);
        }
    }
}

/// Returns the number of threads that read and write connections: half of the processors, up to [`MOST_WORKERS`], so that they
/// do not interrupt those of the model.
// Decision: docs/decisions/serve.md#text-is-handled-on-two-threads
fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, |all| (all.get() / 2).clamp(1, MOST_WORKERS))
}

fn check(names: &[String], limits: &Limits) -> Result<()> {
    if names.is_empty() {
        return Err(Error::NoName);
    }
    let all = [
        ("the limit on requests", limits.requests),
        ("the limit on the size of a body", limits.body_bytes),
        ("the limit on connections", limits.connections),
        ("the limit on answers per request", limits.samples),
        ("the limit on tokens per answer", limits.answer_tokens.unwrap_or(1)),
    ];
    match all.into_iter().find(|(_, limit)| *limit == 0) {
        Some((limit, _)) => Err(Error::Limit { limit }),
        None => Ok(()),
    }
}

/// Accepts connections until the server stops, then waits until all of them are closed.
async fn accept(listener: TcpListener, routes: Router, limits: Limits, mut stop: watch::Receiver<bool>) {
    let graceful = GracefulShutdown::new();
    let mut warned: Option<Instant> = None;
    let places = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    loop {
        let connection = async {
            let place = Arc::clone(&places).acquire_owned().await.ok()?;
            match listener.accept().await {
                Ok((stream, _)) => Some((stream, place)),
                Err(error) => {
                    // The system may refuse each time for hours.
                    if warned.is_none_or(|at| at.elapsed() > WARN_PAUSE) {
                        warned = Some(Instant::now());
                        warn!(%error, "cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    None
                }
            }
        };
        let connection = tokio::select! {
            _ = stop.wait_for(|&stop| stop) => break,
            connection = connection => connection,
        };
        let Some((stream, place)) = connection else { continue };
        let connection = graceful.watch(serve(stream, routes.clone(), &limits));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "a connection ended early");
            }
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

type Connection = http1::Connection<TokioIo<Patient<TcpStream>>, TowerToHyperService<Router>>;

fn serve(stream: TcpStream, routes: Router, limits: &Limits) -> Connection {
    // Each token is a small packet, which must not wait for more.
    let _ = stream.set_nodelay(true);
    http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(limits.receive_time).serve_connection(
        TokioIo::new(Patient::new(stream, limits.send_time)),
        TowerToHyperService::new(routes),
    )
}

/// The signals that end the server.
#[cfg(unix)]
struct Signals(tokio::signal::unix::Signal, tokio::signal::unix::Signal);

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

/// The signals that end the server.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
