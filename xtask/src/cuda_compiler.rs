//! The CUDA compiler, from pinned Python wheels, and the source files that it compiles.

use std::path::{Path, PathBuf};

use crate::run::{Result, root};
use crate::tools::Tool;

/// The wheels that contain the compiler. Other versions would generate different PTX.
const WHEELS: &str = "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
     nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85";

/// The folder of the wheels, relative to the workspace root.
const FOLDER: &str = "target/cuda-tools";

/// The compiler.
pub const COMPILER: Tool = Tool::Made { name: "CUDA compiler", is_here: || program("nvcc").is_file(), bring };

fn bring() -> String {
    // Files unpacked from wheels are not executable.
    format!(
        "python3 -m pip install -q --no-deps --target {FOLDER} {WHEELS} && chmod -R u+x {FOLDER}/nvidia/cu13/bin \
         {FOLDER}/nvidia/cu13/nvvm/bin"
    )
}

/// Returns the folder of the compiler's libraries.
pub fn libraries() -> PathBuf {
    root().join(FOLDER).join("nvidia/cu13/lib")
}

/// Returns the path of one of the compiler's programs.
pub fn program(name: &str) -> PathBuf {
    root().join(FOLDER).join("nvidia/cu13/bin").join(name)
}

/// Returns the files in a folder that end in one of `endings`, sorted by name.
pub fn files(folder: &Path, endings: &[&str]) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|end| endings.iter().any(|known| end == *known)))
        .collect();
    files.sort();
    Ok(files)
}
