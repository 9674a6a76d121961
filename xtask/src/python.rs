//! `cargo xtask python`: builds the Python module's wheel, tests it and checks its types, and checks the
//! connector inside vLLM.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use xtask::run::{Result, root, run};
use xtask::tools::{Tool, require};
use xtask::{cuda_double, published};

use crate::ascend_simulator;

/// Options of `cargo xtask python`.
#[derive(Args)]
pub(crate) struct PythonArgs {
    /// Instead of the module's own tests, check the connector inside a real vLLM on the CPU against
    /// transformers: all parts, or one.
    #[arg(long, value_name = "PART")]
    #[expect(clippy::option_option, reason = "clap's form of an option with an optional value")]
    vllm: Option<Option<VllmPart>>,
    /// Instead of checking the connector inside vLLM, measure its speed with the model in this folder.
    #[arg(long, value_name = "FOLDER", requires = "vllm")]
    bench: Option<PathBuf>,
}

/// One part of the checks inside vLLM.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum VllmPart {
    /// Chunks, with six kinds of small models, and on two ranks.
    Connector,
    /// The tier for ordinary prompts, with small models, and on two ranks.
    Prefix,
    /// Chunks, with a published model, which has its own check.
    Published,
    /// The commands in docs/vllm.md, including those over HTTP, with a published model.
    Docs,
}

/// The virtual environment for the module's tests, relative to the workspace root.
const FOLDER: &str = "target/python";
/// The version of `NumPy` that the examples and tests use.
const NUMPY: &str = "numpy==2.4.6";
/// The other packages in the environment for tests.
const PACKAGES: &str = "maturin==1.16.0 pytest==9.1.1 mypy==2.3.1";

/// A virtual environment like a user's, created from scratch each time, with the wheel and the `NumPy` that
/// the examples need.
const FRESH: &str = "target/python-fresh";

/// The documents whose Python code is run in the environment at [`FRESH`].
const DOCUMENTS: [&str; 2] = ["README.md", "engine/kvpy/README.md"];
/// The program that runs the Python code in documents.
const EXAMPLES: &str = "engine/kvpy/tests/examples.py";

/// The virtual environment with vLLM.
const VLLM: &str = "target/vllm";
/// The script that creates the environment with vLLM.
const INSTALL: &str = "proof/vllm/install.sh";

/// Tools to build and test the module.
pub(crate) const NEEDS: &[Tool] = &[Tool::Program("python3", "python3"), ENVIRONMENT];

/// Tools that the checks inside vLLM and the commands in docs/vllm.md need.
pub(crate) const NEEDS_VLLM: &[Tool] = &[
    Tool::Program("python3", "python3"),
    Tool::Program("curl", "curl"),
    Tool::Program("jq", "jq"),
    ENVIRONMENT,
    VLLM_ENVIRONMENT,
    published::MODEL,
    published::CONVERTED,
];

/// The virtual environment for the module's tests.
const ENVIRONMENT: Tool = Tool::Made {
    name: "Python environment",
    is_here: || program(FOLDER, "mypy").is_file(),
    bring: || format!("python3 -m venv {FOLDER} && {FOLDER}/bin/pip install -q {PACKAGES} {NUMPY}"),
};

/// The virtual environment with vLLM. Creating it takes a quarter of an hour and 6.3 GB.
const VLLM_ENVIRONMENT: Tool = Tool::Made {
    name: "Python environment with vLLM",
    // The script writes this file last.
    is_here: || root().join(VLLM).join("ready").is_file(),
    bring: || format!("bash {INSTALL} {VLLM}"),
};

fn program(folder: &str, name: &str) -> PathBuf {
    root().join(folder).join("bin").join(name)
}

pub(crate) fn python(args: &PythonArgs) -> Result {
    let needs = if args.vllm.is_some() { NEEDS_VLLM } else { NEEDS };
    require("`cargo xtask python`", needs)?;
    let wheel = wheel()?;
    let folder = if args.vllm.is_some() { VLLM } else { FOLDER };
    let mut install = python_of(folder);
    install.args(["-m", "pip", "install", "-q", "--force-reinstall", "--no-deps"]).arg(&wheel);
    run(&mut install, "pip install")?;
    match (args.vllm, &args.bench) {
        (_, Some(model)) => {
            let mut bench = python_of(folder);
            run(bench.arg("proof/vllm/bench_connector.py").arg(model), "the benchmark inside vLLM")
        }
        (Some(part), None) => inside_vllm(part),
        (None, None) => {
            tests()?;
            examples(&wheel)
        }
    }
}

/// Builds the wheel and returns its path.
fn wheel() -> Result<PathBuf> {
    let out = root().join("target/wheels");
    let mut build = Command::new(program(FOLDER, "maturin"));
    build.args(["build", "--release", "--quiet", "--manifest-path", "engine/kvpy/Cargo.toml", "--out"]);
    run(build.arg(&out).current_dir(root()), "maturin build")?;
    let wheels = std::fs::read_dir(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    let newest = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).ok();
    let wheels = wheels.filter_map(|entry| Some(entry.ok()?.path()));
    let wheel = wheels.filter(|path| path.extension().is_some_and(|end| end == "whl")).max_by_key(newest);
    wheel.ok_or_else(|| format!("{} has no wheel", out.display()))
}

fn python_of(folder: &str) -> Command {
    let mut python = Command::new(program(folder, "python"));
    python.current_dir(root());
    python
}

/// Runs the module's tests, and compares its stubs with the built module.
fn tests() -> Result {
    let mut tests = python_of(FOLDER);
    // On a machine without a GPU, the model tests run on the CUDA double.
    cuda_double::provide(&mut tests)?;
    ascend_simulator::provide(&mut tests)?;
    run(tests.args(["-m", "pytest", "-q", "-rs", "engine/kvpy/tests"]), "pytest")?;
    let mut types = python_of(FOLDER);
    types.args(["-m", "mypy", "--strict", "--no-error-summary", "engine/kvpy/python/kvcache/__init__.py"]);
    run(&mut types, "mypy")?;
    let mut stubs = python_of(FOLDER);
    stubs.args(["-m", "mypy.stubtest", "kvcache._native", "--ignore-missing-stub"]);
    run(&mut stubs, "stubtest")
}

/// Installs the wheel as a user would, then runs the Python code in the documents and the notebook.
fn examples(wheel: &Path) -> Result {
    let mut make = Command::new("python3");
    run(make.args(["-m", "venv", "--clear", FRESH]).current_dir(root()), "python3 -m venv")?;
    run(python_of(FRESH).args(["-m", "pip", "install", "-q", NUMPY, "openai<3"]).arg(wheel), "pip install")?;
    run(python_of(FRESH).arg(EXAMPLES).args(DOCUMENTS), "the Python lines of the documents")?;
    run(python_of(FRESH).arg("examples/notebook.py"), "examples/notebook.py")
}

/// Runs the checks inside vLLM.
fn inside_vllm(part: Option<VllmPart>) -> Result {
    let wanted = |one| part.is_none_or(|part| part == one);
    let models = Path::new("target/vllm-models");
    let names = ["llama", "qwen2", "qwen3", "mistral", "mistral-window", "gemma3", "gpt-oss"];
    if !names.iter().all(|name| root().join(models).join(name).join("config.json").is_file()) {
        run(python_of(VLLM).arg("proof/vllm/tiny.py").arg(models), "the small models")?;
    }
    let of = |names: &[&str]| names.iter().map(|name| models.join(name)).collect::<Vec<_>>();
    let check = |program: &str, models: &[PathBuf], more: &[&str]| {
        let mut check = python_of(VLLM);
        run(check.arg(format!("proof/vllm/{program}.py")).args(models).args(more), program)
    };
    let published = [published::directory()];
    if wanted(VllmPart::Connector) {
        check("check_connector", &of(&names[..6]), &[])?;
        check("check_connector", &of(&["llama"]), &["--ranks", "2"])?;
        check("check_slab", &of(&["llama", "mistral-window"]), &[])?;
        check("check_disk", &of(&["llama", "mistral-window"]), &[])?;
    }
    if wanted(VllmPart::Prefix) {
        check("check_prefix", &of(&["llama", "mistral-window", "gemma3", "gpt-oss"]), &[])?;
        check("check_prefix", &of(&["llama", "gemma3"]), &["--ranks", "2"])?;
    }
    if wanted(VllmPart::Published) {
        check("check_connector", &published, &[])?;
        // Two questions show nothing about accuracy, so any loss passes.
        let mut gate = python_of(VLLM);
        gate.args(["-m", "kvcache.vllm", "check"]).args(&published);
        run(gate.args(["--questions", "2", "--floor", "0", "--tolerance", "100"]), "the check of a model")?;
        // Chunks computed alone lose 15 points here, and chunks behind decoys lose 5.
        let mut gate = python_of(VLLM);
        gate.args(["-m", "kvcache.vllm", "check"]).args(&published);
        let asked = "--mode behind:3 --recompute none --notes 4 --floor 20 --tolerance 5".split(' ');
        run(gate.args(asked), "the check of chunks behind decoys")?;
    }
    if wanted(VllmPart::Docs) {
        check("check_docs", &published, &[])?;
        check("check_disk_docs", &published, &[])?;
    }
    Ok(())
}
