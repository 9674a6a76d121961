//! Compares our declarations of CANN's functions with the headers of an installed toolkit, if there is one.

use std::path::{Path, PathBuf};

#[path = "ffi/compare.rs"]
mod compare;

/// Environment variables for CANN's toolkit folder, in order of precedence.
const TOOLKITS: [&str; 2] = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"];

// Decision: docs/decisions/backend-ascend.md#canns-api-is-declared-in-our-own-header
fn main() {
    println!("cargo:rerun-if-changed=ffi");
    println!("cargo:rerun-if-env-changed=CXX");
    for variable in TOOLKITS {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let Some(toolkit) = TOOLKITS.iter().find_map(std::env::var_os) else { return };
    let include = Path::new(&toolkit).join("include");
    // Compare again if another toolkit is installed in the same folder.
    println!("cargo:rerun-if-changed={}", include.display());
    let folders: Vec<PathBuf> = vec![include];
    if !folders[0].join("acl/acl.h").is_file() {
        println!("cargo:warning=no headers of CANN in {}: nothing is compared", folders[0].display());
        return;
    }
    let page = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("compare.cpp");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    match compare::compare_with(Path::new("ffi"), &folders, &page, &compiler) {
        Ok(comparison) => println!(
            "cargo:warning=the headers of CANN in {} have {} of our declarations, all equal; without {}",
            folders[0].display(),
            comparison.compared,
            comparison.absent.join(", ")
        ),
        Err(differences) if differences.contains("static assertion failed") => {
            eprintln!("CANN's headers in {} differ from ffi/ascend.h:\n{differences}", folders[0].display());
            std::process::exit(1);
        }
        Err(reason) => {
            let reason = reason.lines().take(3).collect::<Vec<_>>().join("; ");
            println!("cargo:warning=the headers of CANN cannot be compared: {reason}");
        }
    }
}
