//! `cargo xtask ascend-headers`: what `ascend.h` states, compared with headers that others wrote.
//!
//! The headers come from the package registry, in pinned wheels of `torch_npu`, when the command runs; they are not part of
//! this repository. A wheel has the headers of the CANN that it was built with, without operators.

use std::path::PathBuf;

use crate::run::{Result, root};
use crate::tools::{Tool, require};

#[path = "../../crates/kvbackend-ascend/ffi/compare.rs"]
mod compare;

use compare::compare_with;

/// A C++ compiler; pip and unzip for the wheels.
pub(crate) const NEEDS: &[Tool] =
    &[Tool::Program("g++", "g++"), Tool::Program("python3", "python3"), Tool::AscendHeaders];

/// The wheels, with the CANN whose headers they have.
const WHEELS: [(&str, &str); 2] = [("2.5.1", "CANN 8.1.RC1"), ("2.7.1", "CANN 8.3.RC1")];

/// The folder of the headers, below the root of the workspace.
const FOLDER: &str = "target/ascend-headers";

/// Returns whether the headers are here.
pub(crate) fn is_here() -> bool {
    WHEELS.iter().all(|(version, _)| folders(version)[0].join("acl/acl.h").is_file())
}

/// Returns the command that brings the headers: the wheels are for one Python and one processor, whatever runs here.
pub(crate) fn bring() -> String {
    let download = "python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.10 --implementation cp \
                    --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64";
    let unpack = "python3 -c \"import sys, zipfile; w = zipfile.ZipFile(sys.argv[1]); w.extractall(sys.argv[2], [n for n \
                  in w.namelist() if '/third_party/acl/' in n or '/third_party/hccl/' in n])\"";
    let each = WHEELS.iter().map(|(version, _)| {
        format!(
            "{download} -d {FOLDER} torch_npu=={version} && {unpack} {FOLDER}/torch_npu-{version}-*.whl {FOLDER}/{version}"
        )
    });
    each.collect::<Vec<_>>().join(" && ")
}

/// Returns the folders in which a compiler finds the headers of a wheel.
fn folders(version: &str) -> [PathBuf; 3] {
    let all = root().join(FOLDER).join(version).join("torch_npu/include");
    [all.join("third_party/acl/inc"), all.join("third_party/hccl/inc"), all]
}

pub(crate) fn ascend_headers() -> Result {
    require("`cargo xtask ascend-headers`", NEEDS)?;
    let ffi = root().join("crates/kvbackend-ascend/ffi");
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
    let nowhere = nowhere.unwrap_or_default();
    let (operators, others): (Vec<_>, Vec<_>) = nowhere.iter().partition(|name| name.starts_with("aclnn"));
    println!("in none of them: {} operators' functions; {}", operators.len(), list(&others));
    Ok(())
}

fn list(names: &[&String]) -> String {
    names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
}
