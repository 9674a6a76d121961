//! The errors for libraries that are missing, that lack operators, or that are stubs. Each test opens them in
//! its own process, because a process loads its libraries only once.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvbackend_ascend::AscendBackend;
use kvcore::Error;

use crate::simulator::alone;

/// Environment variable for the child process that opens the backend.
const CHILD: &str = "KV_ASCEND_TEST_CHILD";

/// Opens the backend in a child process, and prints the error.
#[test]
fn child() {
    let Ok(mode) = std::env::var(CHILD) else { return };
    if mode == "stub" {
        let Some((simulator, _alone)) = alone() else { return };
        simulator.fail("aclInit", 1, 100_039);
        return report();
    }
    report();
}

fn report() {
    match AscendBackend::new() {
        Err(Error::NoDevice { backend, reason }) => println!("NoDevice {backend}: {reason}"),
        other => println!("{other:?}"),
    }
}

/// Returns the output of the child process when it loads the libraries from a folder.
fn output_of(folder: &Path, mode: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["libraries::child", "--exact", "--nocapture"])
        .env("KV_ASCEND_LIB_DIR", folder)
        .env(CHILD, mode);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

/// Returns a folder that contains the simulator under some of its names.
fn folder(name: &str, libraries: &[&str]) -> Option<PathBuf> {
    let (_, _alone) = alone()?;
    let simulator = PathBuf::from(std::env::var_os("KV_ASCEND_LIB_DIR")?);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for library in libraries {
        let (from, to) = (simulator.join(library), folder.join(library));
        let _ = std::fs::remove_file(&to);
        std::os::unix::fs::symlink(from, to).unwrap();
    }
    Some(folder)
}

#[test]
fn a_missing_library_is_named_with_the_files_that_were_tried() {
    let text = output_of(Path::new("/no/such/folder"), "open");
    assert!(text.contains("NoDevice ascend: ") && text.contains("/no/such/folder/libascendcl.so"), "{text}");
    assert!(text.contains("CANN 8.0") && text.contains("KV_ASCEND_LIB_DIR"), "{text}");
    let Some(folder) = folder("without-operators", &["libascendcl.so", "libnnopbase.so"]) else { return };
    let text = output_of(&folder, "open");
    assert!(text.contains("NoDevice ascend: ") && text.contains("libopapi.so cannot be loaded"), "{text}");
}

#[test]
fn a_library_without_operators_is_named_with_the_missing_ones() {
    let Some(folder) = folder("other-operators", &["libascendcl.so", "libnnopbase.so"]) else { return };
    // This library is not part of CANN.
    let other = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6"];
    let Some(other) = other.iter().find(|path| Path::new(path).exists()) else {
        return println!("this machine has no libm.so.6 in the usual folders");
    };
    let at = folder.join("libopapi.so");
    let _ = std::fs::remove_file(&at);
    std::os::unix::fs::symlink(other, at).unwrap();
    let text = output_of(&folder, "open");
    assert!(text.contains("CANN lacks aclnnInplaceIndexCopy, aclnnIndexSelect"), "{text}");
}

#[test]
fn a_stub_is_no_library() {
    let Some(folder) = folder("stub", &["libascendcl.so", "libnnopbase.so", "libopapi.so"]) else { return };
    let text = output_of(&folder, "stub");
    assert!(text.contains("NoDevice ascend: the library found is a stub"), "{text}");
}
