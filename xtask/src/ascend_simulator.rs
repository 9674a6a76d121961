//! `cargo xtask ascend-simulator`: builds the simulator of CANN's libraries, which lets the Ascend backend
//! run without an NPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::run::{Result, cargo, create_folder, root, target};

/// The library's folder, relative to the workspace root. Programs find it through `KV_ASCEND_LIB_DIR`.
const FOLDER: &str = "target/ascend-simulator";

/// The environment variable that names the folder from which the backend loads CANN's libraries.
const VARIABLE: &str = "KV_ASCEND_LIB_DIR";

/// The names that the backend loads its libraries by. All of them link to one file, which is loaded once.
const LINKS: [&str; 4] = ["libascendcl.so", "libnnopbase.so", "libopapi.so", "libhccl.so"];

/// Builds the simulator and prints its folder.
pub(crate) fn ascend_simulator() -> Result {
    let folder = build()?;
    println!("for example: {VARIABLE}={FOLDER} cargo run --release -p kvcli --features ascend -- devices");
    println!("{}", folder.display());
    Ok(())
}

/// Builds the simulator and returns its folder.
fn build() -> Result<PathBuf> {
    cargo("build --release --quiet -p ascend-simulator")?;
    let folder = root().join(FOLDER);
    create_folder(&folder)?;
    let library = target().join("release/libascend_simulator.so");
    for name in LINKS {
        link(&library, &folder.join(name))?;
    }
    Ok(folder)
}

/// Creates a link, replacing an older file.
fn link(to: &Path, at: &Path) -> Result {
    let failed = |e: std::io::Error| format!("{}: {e}", at.display());
    match std::fs::remove_file(at) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    #[cfg(unix)]
    return std::os::unix::fs::symlink(to, at).map_err(failed);
    #[cfg(not(unix))]
    std::fs::copy(to, at).map(drop).map_err(failed)
}

/// Points a command at CANN's libraries: the installed ones on a machine with a device, otherwise the
/// simulator.
pub(crate) fn provide(command: &mut Command) -> Result {
    if Path::new("/dev/davinci_manager").exists() || std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    println!(
        "this machine has no NPU (no /dev/davinci_manager), and {VARIABLE} is not set; the simulator is used \
         instead"
    );
    command.env(VARIABLE, build()?);
    Ok(())
}
