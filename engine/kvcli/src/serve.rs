//! `kvc serve`: answers requests over HTTP.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;

use kvchunk::{ChunkCacheConfig, ReuseCell};
use kvengine::{Engine, EngineConfig, Scheduling, TunedReuse};
use kvmodel::ModelDirectory;
use kvserve::{ApiKeys, DocumentReuse, ServedModel, Server, ServerConfig};
use tracing_subscriber::EnvFilter;

use crate::args::{LogFormat, ServerArgs};
use crate::backend::{HostSteps, OpenedBackend};
use crate::error::{Error, Result};
use crate::way::ChosenWay;
use crate::{backend, load};

/// The default share of the KV memory for documents, if they are reused.
const DEFAULT_SHARE: f64 = 0.5;
/// The share of the KV memory for documents if they are not reused.
const UNUSED_SHARE: f64 = 0.05;

/// The name of the built-in model.
const BUILT_IN: &str = "tiny-rag";

pub(crate) fn serve(args: &ServerArgs) -> Result<()> {
    log(args)?;
    let keys = args.api_key_file.as_deref().map(ApiKeys::read).transpose()?;
    check_passed(args)?;
    let OpenedBackend { backend, dense } = backend::open(
        &args.engine.backend,
        HostSteps { compute: args.engine.compute, ..HostSteps::default() },
    )?;
    let ModelDirectory { model, codec, .. } = load::model(args.model(), args.engine.weights, dense)?;
    let reuse = if args.way.reuse.is_some() || args.reuse_anyway {
        let ChosenWay { reuse, decoys, .. } = ChosenWay::new(&args.way, &model, &codec)?;
        Some(DocumentReuse { settings: reuse, decoys })
    } else {
        None
    };
    let share = if reuse.is_some() { DEFAULT_SHARE } else { UNUSED_SHARE };
    let cell = reuse.as_ref().map_or_else(ReuseCell::default, |reuse| reuse.settings.cell);
    let config = EngineConfig {
        kv_format: args.engine.dtype,
        keys: args.engine.keys,
        block_size: args.block_size,
        kv_memory: args.engine.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
        chunks: ChunkCacheConfig {
            compute_mode: cell.mode,
            position_strategy: cell.strategy,
            memory_share: args.memory_share.unwrap_or(share),
            ..ChunkCacheConfig::default()
        },
        enable_sleep_mode: args.enable_sleep_mode,
        scheduling: Scheduling { running: args.limits.max_running, ..Scheduling::default() },
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(model, backend, codec.digest(), &config)?;
    args.disk.open(&mut engine)?;
    let served = ServedModel { engine, codec, names: names(args), reuse };
    let address = SocketAddr::new(args.host, args.port);
    let (documents, origins, limits) =
        (args.documents.clone(), args.allow_origin.clone(), args.limits.limits());
    let server = Server::start(served, ServerConfig { address, keys, documents, origins, limits })?;
    note!("listening on http://{}/v1", server.address());
    Ok(server.run_until_signal()?)
}

/// Checks that the file with the settings for reuse shows that they keep the answers.
fn check_passed(args: &ServerArgs) -> Result<()> {
    let Some(path) = args.way.reuse.as_deref().filter(|_| !args.reuse_anyway) else { return Ok(()) };
    let tuned = TunedReuse::read(path)?;
    match tuned.measured().fits {
        Some(true) => Ok(()),
        _ => Err(Error::NotPassed { path: path.to_owned(), within: tuned.measured().within }),
    }
}

/// Returns the names of the model in requests.
fn names(args: &ServerArgs) -> Vec<String> {
    if !args.served_model_name.is_empty() {
        return args.served_model_name.clone();
    }
    let name = |path: &Path| {
        // A folder such as `.` has its name only with its whole path.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
        name.map(|name| name.to_string_lossy().into_owned())
    };
    vec![args.model().and_then(name).unwrap_or_else(|| BUILT_IN.to_owned())]
}

/// Writes the log to standard error.
fn log(args: &ServerArgs) -> Result<()> {
    let filter = EnvFilter::try_new(&args.log);
    let filter =
        filter.map_err(|error| Error::Log { filter: args.log.clone(), reason: error.to_string() })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let log = log.with_ansi(std::io::stderr().is_terminal());
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}
