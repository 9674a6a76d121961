//! `cargo xtask ascend-headers`: what `ascend.h` states, compared with headers that others wrote.
//!
//! The headers come from the package registry, in pinned wheels of `torch_npu`, when the command runs; they are not part of
//! this repository. A wheel has the headers of the CANN that it was built with, without operators. A crate has some
//! operators, as Rust.

use std::path::PathBuf;

use crate::run::{Result, root};
use crate::tools::{Tool, require};

mod cann_sys;
#[path = "../../../kvbackend-ascend/ffi/compare.rs"]
mod compare;

use cann_sys::{Compared, Declared};
use compare::compare_with;

/// A C++ compiler; pip and unzip for the wheels.
pub(crate) const NEEDS: &[Tool] =
    &[Tool::Program("g++", "g++"), Tool::Program("python3", "python3"), Tool::AscendHeaders];

/// The wheels, with the CANN whose headers they have.
const WHEELS: [(&str, &str); 2] = [("2.5.1", "CANN 8.1.RC1"), ("2.7.1", "CANN 8.3.RC1")];

/// The crate that declares functions of CANN for itself.
const CRATE: (&str, &str) = ("cann-sys", "0.1.3");

/// The folder of the headers, below the root of the workspace.
const FOLDER: &str = "target/ascend-headers";

/// Returns whether the headers are here.
pub(crate) fn is_here() -> bool {
    WHEELS.iter().all(|(version, _)| folders(version)[0].join("acl/acl.h").is_file())
        && crate_folder().join("lib.rs").is_file()
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
    let (name, version) = CRATE;
    let manifest = format!("{FOLDER}/crate/Cargo.toml");
    let vendor = format!(
        "mkdir -p {FOLDER}/crate/src && touch {FOLDER}/crate/src/lib.rs && printf '[package]\\nname = \"bindings\"\\n\
         [dependencies]\\n{name} = \"={version}\"\\n[workspace]\\n' > {manifest} && cargo vendor -q --manifest-path \
         {manifest} {FOLDER}/crate/vendor > {FOLDER}/crate/config"
    );
    each.chain([vendor]).collect::<Vec<_>>().join(" && ")
}

/// Returns the folder of the crate's files.
fn crate_folder() -> PathBuf {
    root().join(FOLDER).join("crate/vendor").join(CRATE.0).join("src")
}

/// Returns the folders in which a compiler finds the headers of a wheel.
fn folders(version: &str) -> [PathBuf; 3] {
    let all = root().join(FOLDER).join(version).join("torch_npu/include");
    [all.join("third_party/acl/inc"), all.join("third_party/hccl/inc"), all]
}

pub(crate) fn ascend_headers() -> Result {
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
