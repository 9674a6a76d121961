//! Errors that `kvc` reports.

use std::path::PathBuf;

/// A failure, with a message for the user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The engine, its model or a cache failed.
    #[error(transparent)]
    Engine(#[from] kvengine::Error),
    /// kvlab failed.
    #[error(transparent)]
    Lab(#[from] kvlab::Error),
    /// The prompt file cannot be read.
    #[error("cannot read the prompt from {from}: {source}")]
    Prompt { from: String, source: std::io::Error },
    /// A document cannot be read.
    #[error("cannot read the document {path}: {source}")]
    Document { path: PathBuf, source: std::io::Error },
    /// A document has no text.
    #[error("the document {0} is empty; remove it, or add some text")]
    EmptyDocument(PathBuf),
    /// A directory of decoys is empty.
    #[error("the directory {0} contains no decoys; put one text file into it for each decoy")]
    NoDecoys(PathBuf),
    /// There is nothing to store.
    #[error(
        "{0} contains no documents; put one text file into the folder, or one line into the file, for each"
    )]
    NoDocuments(PathBuf),
    /// A line of a file is not a document.
    #[error(
        "{path}, line {line}: {reason}; each line must be a JSON string, or an object with a field `text`"
    )]
    DocumentLine { path: PathBuf, line: usize, reason: String },
    /// The disk takes too long.
    #[error(
        "the disk with {0} takes more than two minutes to store a document; check the disk, and run the command again to continue"
    )]
    SlowDisk(PathBuf),
    /// A folder on a disk cannot be described.
    #[error(transparent)]
    Tier(#[from] kvtier::Error),
    /// The file with the form of an answer cannot be read.
    #[error("cannot read the form of the answer from {path}: {source}")]
    ReadForm { path: PathBuf, source: std::io::Error },
    /// The file with the form of an answer is malformed, or no answer can have the form.
    #[error("{path}: {source}")]
    Form { path: PathBuf, source: kvengine::Error },
    /// A message file is malformed, or its conversation cannot be answered.
    #[error("{path}: {source}")]
    Messages { path: PathBuf, source: kvengine::Error },
    /// The device's matrix products cannot compute like this.
    #[cfg(any(feature = "ascend", feature = "cuda"))]
    #[error("`--compute {0}` is for matrix products on the CPU; leave it out, or add `--backend cpu`")]
    ExactOnly(kvmodel::dense::ComputeType),
    /// The program was built without the requested backend.
    #[error("this program was built without the {0:?} backend; build it with `--features {0}`")]
    #[cfg(not(all(feature = "ascend", feature = "cpu", feature = "cuda", feature = "wgpu")))]
    NoBackend(&'static str),
    /// The model's path does not exist.
    #[error(
        "{0} does not exist; --model takes a directory with config.json, *.safetensors and tokenizer.json, or a GGUF file"
    )]
    NoModel(PathBuf),
    /// A model with random weights does not fit into the memory.
    #[error(
        "a model of the size {layers}x{width} takes about {needed} MiB for its weights, more than {}; choose a smaller \
         --size, or --weights q8",
        .free.map_or_else(|| "this process may have".to_owned(), |free| format!("the {free} MiB that are free"))
    )]
    ModelTooLarge { layers: usize, width: usize, needed: u64, free: Option<u64> },
    /// The question file cannot be read.
    #[error("cannot read the questions from {path}: {source}")]
    Dataset { path: PathBuf, source: std::io::Error },
    /// The gate was asked to judge several strategies at once.
    #[error("the gate judges one strategy; give --strategy once")]
    SeveralStrategies,
    /// The answers cannot be written.
    #[error("cannot write the answers to {path}: {source}")]
    Answers { path: PathBuf, source: std::io::Error },
    /// The questions cannot be written.
    #[error("cannot write the questions to {path}: {source}")]
    SavedQuestions { path: PathBuf, source: std::io::Error },
    /// An answer file is from another evaluation.
    #[error(
        "{path} cannot be continued: {reason}; repeat the options of the evaluation that wrote it, or choose another file"
    )]
    OtherAnswers { path: PathBuf, reason: String },
    /// An answer file cannot be read.
    #[error("cannot read {path}: {source}")]
    ReadAnswers { path: PathBuf, source: std::io::Error },
    /// A line in an answer file is not an answer.
    #[error("{path}, line {line}: {reason}; use a file that kvc eval --answers wrote")]
    Answer { path: PathBuf, line: usize, reason: String },
    /// The answer files are empty.
    #[error("the files given with --read contain no answers; use files that kvc eval --answers wrote")]
    NoAnswers,
    /// An arrival trace cannot be read.
    #[error("cannot read the trace {path}: {source}")]
    Trace { path: PathBuf, source: std::io::Error },
    /// A line of a trace is not an arrival.
    #[error(
        "{path}, line {line}: {reason}; each line must be a JSON object with at (seconds), prompt_tokens and \
         answer_tokens"
    )]
    Arrival { path: PathBuf, line: usize, reason: String },
    /// The question file has a malformed line, or no questions.
    #[error("{path}: {source}")]
    Questions { path: PathBuf, source: kvlab::Error },
    /// Full attention answers too few questions correctly for reuse to be judged.
    #[error(
        "full attention itself answers only {right:.0} % of the questions correctly, too few to judge reuse (--floor \
         {floor:.0}), so no file was written; ask questions that the model can answer, with fewer --texts or another \
         --dataset"
    )]
    NothingJudged { right: f64, floor: f64 },
    /// A question's documents or system prompt contain the separator.
    #[error(
        "{path}, line {line}: {field} contains the separator, which makes its end ambiguous; choose another separator \
         with --separator, or change the text"
    )]
    Separator { path: PathBuf, line: usize, field: String },
    /// There are no questions of the requested kinds.
    #[error(
        "there are no questions of the kinds given with --kind; --texts has local, comparison and reference questions, \
         and world.json has local, cross-start and cross-middle questions"
    )]
    NoKind,
    /// The gate found that reuse does not suit the model.
    #[error("reuse does not suit this model; these checks failed: {0}")]
    GateClosed(String),
    /// The gate could not decide whether reuse suits the model.
    #[error("cannot decide whether reuse suits this model: {0}")]
    GateUndecided(String),
    /// A file of results, such as a plot, cannot be written.
    #[error("cannot write {path}: {reason}")]
    Results { path: PathBuf, reason: String },
    /// The demo's check of its own results failed.
    #[error("{0}")]
    Demo(String),
    /// The server failed.
    #[error(transparent)]
    Serve(#[from] kvserve::Error),
    /// The client of a server failed.
    #[error(transparent)]
    Load(#[from] kvload::Error),
    /// A server says of no model that it has it.
    #[error("{0} names no model; give the name that its requests must have with --model-name")]
    NoModelName(kvload::ServerUrl),
    /// A server does not describe its caches.
    #[error("{0} is no kvc serve: its /overview cannot be read")]
    NoOverview(kvload::ServerUrl),
    /// The doctor found that answers with documents from the cache differ from the same computation without it.
    #[error(
        "the cache is wrong: it changes log-probabilities by {difference:.3}, and rounding by at most {rounding}"
    )]
    WrongCache { difference: f64, rounding: f64 },
    /// The answers that show whether reuse suits the model do not say so.
    #[error(
        "{path} does not show that the settings lose at most {within} percentage points of answers; run kvc tune with more \
         questions, or give --reuse-anyway as well"
    )]
    NotPassed { path: PathBuf, within: f64 },
    /// The filter of the log is malformed.
    #[error(
        "--log {filter:?}: {reason}; write a level such as info, or levels of modules such as warn,kvserve=debug"
    )]
    Log { filter: String, reason: String },
    /// The output cannot be written.
    #[error("cannot write the result: {0}")]
    Output(#[from] std::io::Error),
}

impl Error {
    /// Returns advice if the user can avoid the error by changing an option or the input, for example if a
    /// cache is too small or a chat template fails.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        use kvcore::Error::{Allocation, NotEnoughMemory, OutOfBlocks, TooLarge};
        use kvengine::Error::{Chunk, Core, Model, NoChunks};
        use kvmodel::Error::Template;
        if let Self::Messages { source: Model(Template { .. }), .. } = self {
            return Some("change the conversation or the template, or give the prompt without --messages");
        }
        let (Self::Engine(error) | Self::Lab(kvlab::Error::Engine(error))) = self else { return None };
        match error {
            NoChunks(_) => Some("use --cache paged, or --full-attention without --chunk-sleep"),
            Model(Template { .. }) => Some("change the prompt or the template, or omit --chat"),
            // Only sleeping documents have a separate memory budget.
            Chunk(kvchunk::Error::Core(NotEnoughMemory { .. })) => {
                Some("give sleeping documents more host memory: --chunk-sleep-memory MIB")
            }
            Core(OutOfBlocks { .. } | NotEnoughMemory { .. })
            | Chunk(kvchunk::Error::Core(OutOfBlocks { .. })) => {
                Some("give the caches more memory: --kv-memory MIB (--help lists the default)")
            }
            Core(TooLarge { what: "num_blocks", .. })
            | Chunk(kvchunk::Error::Core(TooLarge { what: "num_blocks", .. })) => {
                Some("the caches cannot have so many blocks; give them less memory with --kv-memory MIB")
            }
            Core(Allocation { .. }) | Chunk(kvchunk::Error::Core(Allocation { .. })) => Some(
                "the device has less free memory than that; give the caches less memory with --kv-memory MIB, or free \
                 memory on the device",
            ),
            _ => None,
        }
    }
}

impl From<kvmodel::Error> for Error {
    fn from(error: kvmodel::Error) -> Self {
        Self::Engine(error.into())
    }
}

pub(crate) type Result<T> = std::result::Result<T, Error>;
