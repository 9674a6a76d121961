//! `cargo xtask bindgen`: the Rust bindings of `ascend.h`, which are part of the Ascend backend.

use std::path::Path;
use std::process::Command;

use clap::Args;

use xtask::run::{Result, create_folder, none_of, read, root, run, write};
use xtask::tools::{Tool, require};

/// Options of `cargo xtask bindgen`.
#[derive(Args)]
pub(crate) struct BindgenArgs {
    /// Compare with the committed bindings and write nothing; fail if they differ.
    #[arg(long)]
    check: bool,
}

/// bindgen, and the library with which it parses C. Another version may write different Rust.
pub(crate) const NEEDS: &[Tool] =
    &[Tool::Crate("bindgen", "bindgen-cli", "0.72.1"), Tool::Package("libclang-14-dev")];

/// The files of the bindings, each with its share of `ascend.h`: types and values, or the functions of one
/// library in a table that is filled at run time.
const FILES: [(&str, &[&str]); 5] = [
    ("types", &["--ignore-functions", "--allowlist-item", "acl.*|ACL_.*|Hccl.*|HCCL_.*"]),
    (
        "acl",
        &[
            "--dynamic-loading",
            "Acl",
            "--allowlist-function",
            "aclInit|aclGetRecentErrMsg|aclrt.*|aclmdlRI.*",
        ],
    ),
    ("base", &["--dynamic-loading", "Base", "--allowlist-function", "acl(Create|Destroy|SetAclOp).*"]),
    ("operators", &["--dynamic-loading", "Operators", "--allowlist-function", "aclnn.*"]),
    ("hccl", &["--dynamic-loading", "Hccl", "--allowlist-function", "Hccl.*"]),
];

pub(crate) fn bindgen(args: &BindgenArgs) -> Result {
    require("`cargo xtask bindgen`", NEEDS)?;
    let folder = root().join("kvbackend-ascend");
    let (header, committed, made) =
        (folder.join("ffi/ascend.h"), folder.join("src/bindings"), root().join("target/bindings"));
    create_folder(&made)?;
    let mut different = Vec::new();
    for (name, options) in FILES {
        let file = made.join(format!("{name}.rs"));
        make(&header, &file, options)?;
        // bindgen writes for older versions of libloading.
        let new = read(&file)?.replace("AsRef<::std::ffi::OsStr>", "::libloading::AsFilename");
        let old = read(&committed.join(format!("{name}.rs"))).unwrap_or_default();
        if new == old {
            continue;
        }
        different.push(format!("{name}.rs"));
        if !args.check {
            write(&committed.join(format!("{name}.rs")), &new)?;
        }
    }
    if args.check {
        none_of("differ from ascend.h; run `cargo xtask bindgen`", &different)?;
    }
    println!("{} of {} files of bindings changed", different.len(), FILES.len());
    Ok(())
}

/// Makes one file of the bindings.
fn make(header: &Path, file: &Path, options: &[&str]) -> Result {
    let mut command = Command::new("bindgen");
    command.arg(header).args(options).args([
        "--no-layout-tests",
        "--no-doc-comments",
        "--no-prepend-enum-name",
    ]);
    command.args(["--use-core", "--rust-target", "1.89", "--rust-edition", "2024", "--wrap-unsafe-ops"]);
    if options.contains(&"--dynamic-loading") {
        command.args(["--no-recursive-allowlist", "--raw-line", "use super::types::*;"]);
    }
    command.arg("-o").arg(file).args(["--", "-std=c11"]);
    run(&mut command, "bindgen")
}
