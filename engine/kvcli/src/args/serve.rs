//! Options of `kvc serve`, on the command line and in a file.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser as _, ValueEnum};
use kvserve::Limits;

use super::disk::bytes;
use super::{Cli, DiskArgs, EngineArgs, WayArgs, at_least_one, number, share};

/// The heading of the limits in the help text.
const LIMITS: &str = "Limits";

/// Options of `kvc serve`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
#[command(after_help = "\
Start the server, and point any client of OpenAI's API at it:

    kvc serve
    curl http://127.0.0.1:8000/v1/chat/completions \\
      -H 'content-type: application/json' \\
      -d '{\"messages\": [{\"role\": \"user\", \"content\": \"alba ?\"}],
           \"documents\": [\"alba is red .\"]}'

Without --reuse or --reuse-anyway, answers are those of full attention, and only the beginning of a prompt is reused. To
reuse documents at any position, find the settings that keep your model's answers, and give the file to the server:

    kvc tune --model ./Qwen3-0.6B --chat --out reuse.json
    kvc serve ./Qwen3-0.6B --reuse reuse.json --disk ./kv

A file for --config has the options by their names, and the model as `model`. Options on the command line take precedence:

    model = \"./Qwen3-0.6B\"
    port = 8080
    reuse = \"reuse.json\"

The server speaks HTTP without encryption: put a proxy with TLS in front of it for clients on other machines.
docs/serve.md describes the paths and fields.")]
pub(crate) struct ServerArgs {
    /// GGUF file, or Hugging Face directory with config.json, safetensors and tokenizer.json. Default: the built-in
    /// model.
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,

    /// The model that the file of --config names.
    #[arg(long, hide = true)]
    model_of_file: Option<PathBuf>,

    /// Address to listen on. 0.0.0.0 listens on all networks, so give --api-key-file with it.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Port to listen on. 0 chooses a free one, which is printed.
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(crate) port: u16,

    /// Name of the model in requests. May be repeated; the first name stands in answers. Default: the name of the file or
    /// folder.
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,

    /// File with more options, in TOML.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// File with a key and the name of its tenant in each line. Requests need one of the keys, and tenants find nothing that
    /// others have cached. Keys of the tenant `operator` may read metrics, and control sleep and caches. Default: everybody
    /// may do everything.
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// Origin of web pages that may use the server in browsers, such as `https://app.example`. May be repeated. `*` stands for
    /// all pages, and needs --api-key-file. Default: only the server's own pages.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) allow_origin: Vec<String>,

    /// File in which registered documents (PUT /v1/documents/ID) outlive the server. It contains their texts, and only its
    /// owner can read it. One server at a time can use a file. Default: they are forgotten at the end.
    #[arg(long, value_name = "FILE")]
    pub(crate) documents: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) disk: DiskArgs,

    /// Reuse documents without a file that shows how many answers are kept, or even if the file does not show that enough
    /// answers are kept.
    #[arg(long)]
    pub(crate) reuse_anyway: bool,

    #[command(flatten)]
    pub(crate) way: WayArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Tokens per block of the cache.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) block_size: usize,

    /// Fraction of --kv-memory to reserve for documents; prompts use the rest. Default: 0.5 if documents are reused.
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) memory_share: Option<f64>,

    /// Let `/sleep` and `/wake_up` release the memory of the caches and take it back.
    #[arg(long)]
    pub(crate) enable_sleep_mode: bool,

    #[command(flatten)]
    pub(crate) limits: LimitArgs,

    /// Lines to write to the log on standard error: error, warn, info, debug or trace, also per module, as in
    /// `info,kvserve=debug`.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,

    /// Form of the log.
    #[arg(long, value_enum, default_value = "text")]
    pub(crate) log_format: LogFormat,
}

/// The form of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Limits on requests.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Maximum size of a request's body, such as 32MiB.
    #[arg(long, help_heading = LIMITS, value_name = "SIZE", default_value = "32MiB", value_parser = bytes)]
    max_body: u64,

    /// Maximum number of requests that are answered or wait at the same time; others get the status 429. Of several
    /// tenants, each may have half of them.
    #[arg(long, help_heading = LIMITS, value_name = "N", default_value_t = Limits::default().requests, value_parser = at_least_one)]
    max_requests: usize,

    /// Maximum number of a tenant's registered documents (PUT /v1/documents/ID). With 0, prompts are not searched for any.
    #[arg(long, help_heading = LIMITS, value_name = "N", default_value_t = Limits::default().documents)]
    max_documents: usize,

    /// Maximum size of a tenant's registered documents together, such as 64MiB.
    #[arg(long, help_heading = LIMITS, value_name = "SIZE", default_value = "64MiB", value_parser = bytes)]
    max_document_bytes: u64,

    /// Maximum number of answers that are computed at the same time.
    #[arg(long, help_heading = LIMITS, value_name = "N", default_value_t = kvengine::Scheduling::default().running, value_parser = at_least_one)]
    pub(crate) max_running: usize,

    /// Maximum number of tokens of an answer. Default: as many as the model's context has room for.
    #[arg(long, help_heading = LIMITS, value_name = "N", value_parser = at_least_one)]
    max_answer_tokens: Option<usize>,

    /// Maximum number of answers per request.
    #[arg(long, help_heading = LIMITS, value_name = "N", default_value_t = Limits::default().samples, value_parser = at_least_one)]
    max_answers: usize,

    /// Maximum number of seconds for an answer; then it ends with an error. Default: no limit.
    #[arg(long, help_heading = LIMITS, value_name = "SECONDS", value_parser = seconds)]
    max_answer_time: Option<Duration>,

    /// Maximum number of seconds for the head of a request, and then for its body.
    #[arg(long, help_heading = LIMITS, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    receive_time: Duration,

    /// Maximum number of seconds for which a client may leave an answer unread.
    #[arg(long, help_heading = LIMITS, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    send_time: Duration,

    /// Maximum number of open connections; others wait.
    #[arg(long, help_heading = LIMITS, value_name = "N", default_value_t = Limits::default().connections, value_parser = at_least_one)]
    max_connections: usize,

    /// Maximum number of seconds for running answers and unfinished requests to end after SIGTERM or SIGINT.
    #[arg(long, help_heading = LIMITS, value_name = "SECONDS", default_value = "25", value_parser = seconds)]
    shutdown_time: Duration,
}

impl LimitArgs {
    /// Returns the limits.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            body_bytes: usize::try_from(self.max_body).unwrap_or(usize::MAX),
            requests: self.max_requests,
            answer_tokens: self.max_answer_tokens,
            samples: self.max_answers,
            documents: self.max_documents,
            document_bytes: usize::try_from(self.max_document_bytes).unwrap_or(usize::MAX),
            answer_time: self.max_answer_time,
            receive_time: self.receive_time,
            send_time: self.send_time,
            connections: self.max_connections,
            shutdown_time: self.shutdown_time,
        }
    }
}

impl ServerArgs {
    /// Returns the path of the model, or `None` for the built-in one.
    pub(crate) fn model(&self) -> Option<&Path> {
        self.model.as_ref().or(self.model_of_file.as_ref()).map(PathBuf::as_path)
    }

    /// Returns an error message if a given option has no effect.
    pub(super) fn without_effect(&self) -> Option<&'static str> {
        let chosen = !self.way.is_usual() || !self.way.decoys.is_empty();
        (chosen && self.way.reuse.is_none() && !self.reuse_anyway).then_some(
            "the options for the reuse of documents need --reuse-anyway, or --reuse FILE in place of them",
        )
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = number(text, |s: &f64| (0.0..=1e9).contains(s) && *s > 0.0, "a number of seconds above 0")?;
    Ok(Duration::from_secs_f64(seconds))
}

impl Cli {
    /// Parses the command line, with the options of the file that `kvc serve --config` names before those of the command
    /// line. Exits with code 2 if the arguments are invalid.
    pub(super) fn parse_with_file() -> Self {
        let mut given: Vec<OsString> = std::env::args_os().collect();
        let path = config_path(&given);
        if let Some(path) = path {
            match of_file(&path) {
                // The program and the command come first.
                Ok(more) => drop(given.splice(2..2, more)),
                Err(reason) => {
                    let message = format!("{}: {reason}", path.display());
                    Self::command().error(ErrorKind::InvalidValue, message).exit();
                }
            }
        }
        Self::parse_from(given)
    }
}

/// Returns the file that `--config` of `kvc serve` names.
fn config_path(given: &[OsString]) -> Option<PathBuf> {
    let mut rest = given.get(1).filter(|command| *command == "serve").map(|_| given[2..].iter())?;
    let mut path = None;
    while let Some(option) = rest.next() {
        if option == "--config" {
            path = rest.next().map(PathBuf::from);
        } else if let Some(value) = option.to_str().and_then(|option| option.strip_prefix("--config=")) {
            path = Some(PathBuf::from(value));
        }
    }
    path
}

/// Returns the options of a file as arguments.
fn of_file(path: &Path) -> Result<Vec<OsString>, String> {
    let text = crate::text_file::read(path).map_err(|error| error.to_string())?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut all = Vec::new();
    for (name, value) in table {
        if name == "config" {
            return Err("a file cannot name another one under config".to_owned());
        }
        let values = match value {
            toml::Value::Array(values) => values,
            value => vec![value],
        };
        for value in values {
            let text = match value {
                toml::Value::Boolean(true) => None,
                toml::Value::Boolean(false) => continue,
                toml::Value::String(text) => Some(text),
                toml::Value::Integer(number) => Some(number.to_string()),
                toml::Value::Float(number) => Some(number.to_string()),
                other => {
                    return Err(format!(
                        "{name} is {}; it must be a text, a number, true or false",
                        other.type_str()
                    ));
                }
            };
            match text {
                Some(text) if name == "model" => all.push(format!("--model-of-file={text}").into()),
                Some(text) => all.push(format!("--{}={text}", name.replace('_', "-")).into()),
                None => all.push(format!("--{}", name.replace('_', "-")).into()),
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;

    fn written(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kvc.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn a_file_has_the_options_by_their_names() {
        let (_folder, path) = written(
            "model = \"m\"\nport = 8080\nreuse_anyway = true\nenable-sleep-mode = false\nmemory-share = 0.25\n\
             served-model-name = [\"a\", \"b\"]\nallow-origin = \"https://app.example\"\n",
        );
        let given = of_file(&path).unwrap();
        let expected = [
            "--allow-origin=https://app.example",
            "--memory-share=0.25",
            "--model-of-file=m",
            "--port=8080",
            "--reuse-anyway",
            "--served-model-name=a",
            "--served-model-name=b",
        ];
        assert_eq!(given, expected, "false leaves the option out");
        let line = |more: &[&str]| {
            let more = more.iter().map(OsString::from);
            ["kvc".into(), "serve".into()].into_iter().chain(given.clone()).chain(more).collect::<Vec<_>>()
        };
        let parsed = |more: &[&str]| {
            let Command::Serve(args) = Cli::try_parse_from(line(more)).unwrap().command else { panic!() };
            args
        };
        let args = parsed(&[]);
        assert_eq!((args.port, args.model(), args.reuse_anyway), (8080, Some("m".as_ref()), true));
        assert_eq!(args.served_model_name, ["a", "b"]);
        assert_eq!(args.allow_origin, ["https://app.example"]);
        let args = parsed(&["n", "--port", "1"]);
        assert_eq!((args.port, args.model()), (1, Some("n".as_ref())));
    }

    #[test]
    fn a_wrong_file_names_the_option() {
        for (text, reason) in [
            ("port = ", "line 1"),
            ("[limits]\nport = 1", "limits is table"),
            ("config = \"other\"", "another one"),
            ("port = [[1]]", "port is array"),
        ] {
            let (_folder, path) = written(text);
            let error = of_file(&path).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        let (_folder, path) = written("pott = 1");
        let line = [&["kvc".into(), "serve".into()], &of_file(&path).unwrap()[..]].concat();
        assert!(Cli::try_parse_from(line).unwrap_err().to_string().contains("--pott"));
    }

    #[test]
    fn the_file_is_found_in_both_spellings() {
        let line = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(config_path(&line(&["kvc", "serve", "m", "--config", "a"])), Some("a".into()));
        assert_eq!(config_path(&line(&["kvc", "serve", "--config=b"])), Some("b".into()));
        assert_eq!(config_path(&line(&["kvc", "run", "--config", "a"])), None);
        assert_eq!(config_path(&line(&["kvc", "serve"])), None);
    }

    #[test]
    fn settings_for_reuse_need_a_decision() {
        let args = |words: &[&str]| {
            let line = ["kvc", "serve"].iter().chain(words);
            let Command::Serve(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
            args.without_effect().is_some()
        };
        assert!(args(&["--recompute", "link:4"]) && args(&["--decoys", "d"]));
        assert!(
            !args(&["--recompute", "link:4", "--reuse-anyway"]) && !args(&["--reuse", "f"]) && !args(&[])
        );
        assert!(!args(&["--reuse", "f", "--reuse-anyway"]));
    }
}
