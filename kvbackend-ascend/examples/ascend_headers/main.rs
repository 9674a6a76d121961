//! `cargo xtask ascend-headers`: compares the declarations in `ascend.h` with third-party headers.
//!
//! The headers are in pinned `torch_npu` wheels from the package registry, not in this repository. A wheel
//! contains the headers of the CANN version that it was built with, but not the operators' headers. A crate
//! declares some of the operators in Rust.

use std::process::ExitCode;

use clap::Parser;
use xtask::cann_headers::{CRATE, FOLDER, NEEDS, WHEELS, crate_folder, folders};
use xtask::run::{Result, exit_code, root};
use xtask::tools::require;

mod cann_sys;
#[path = "../../ffi/compare.rs"]
mod compare;

use cann_sys::{Compared, Declared};
use compare::compare_with;

/// Compare the Ascend backend's C header with the headers of CANN, from pinned wheels of `torch_npu`, and its
/// bindings with those of another crate.
#[derive(Parser)]
#[command(name = "cargo xtask ascend-headers", bin_name = "cargo xtask ascend-headers")]
struct AscendHeadersCli {}

fn main() -> ExitCode {
    let AscendHeadersCli {} = AscendHeadersCli::parse();
    exit_code(ascend_headers())
}

fn ascend_headers() -> Result {
    require("`cargo xtask ascend-headers`", NEEDS)?;
    let ffi = root().join("kvbackend-ascend/ffi");
    let mut nowhere: Option<Vec<String>> = None;
    for (version, cann) in WHEELS {
        let page = root().join(FOLDER).join(format!("{version}.cpp"));
        let comparison = compare_with(&ffi, &folders(version), &page, "g++")
            .map_err(|differences| format!("torch_npu {version} ({cann}) differs:\n{differences}"))?;
        let all = comparison.compared + comparison.absent.len();
        println!("torch_npu {version} ({cann}): {} of {all} facts compared, all equal", comparison.compared);
        let known = nowhere.take().unwrap_or_else(|| comparison.absent.clone());
        nowhere = Some(known.into_iter().filter(|name| comparison.absent.contains(name)).collect());
    }
    let ours = Declared::of(&root().join("kvbackend-ascend/src/bindings"))?;
    let (name, version) = CRATE;
    let compared = ours
        .compare(&Declared::of(&crate_folder())?)
        .map_err(|differences| format!("{name} {version} differs:\n{differences}"))?;
    let Compared { functions, values } = compared;
    println!("{name} {version}: {functions} functions and {values} values compared, all equal");
    let nowhere = nowhere.unwrap_or_default();
    let (operators, others): (Vec<_>, Vec<_>) = nowhere.iter().partition(|name| name.starts_with("aclnn"));
    println!("in none of the headers: {} operators' functions; {}", operators.len(), list(&others));
    Ok(())
}

fn list(names: &[&String]) -> String {
    names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
}
