//! `cargo xtask bindgen`: generates the Ascend backend's Rust bindings from `ascend.h`.

use std::path::Path;
use std::process::Command;

use clap::Args;

use xtask::run::{Result, create_folder, none_of, read, root, run, write};
use xtask::tools::{Tool, require};

/// Options of `cargo xtask bindgen`.
#[derive(Args)]
pub(crate) struct BindgenArgs {
    /// Compare with the committed bindings, write nothing, and fail if they differ.
    #[arg(long)]
    check: bool,
}

/// bindgen, and the library that it parses C with. Another version may generate different Rust.
pub(crate) const NEEDS: &[Tool] =
    &[Tool::Crate("bindgen", "bindgen-cli", "0.72.1"), Tool::Package("libclang-14-dev")];

/// The binding files. Each entry has the file's path, the function table that the macro `table` makes from
/// the file, if any, and the part of `ascend.h` that the file covers.
const FILES: [(&str, Option<&str>, &str); 5] = [
    ("types", None, "acl.*|ACL_.*|Hccl.*|HCCL_.*"),
    ("acl", Some("Acl"), "aclInit|aclGetRecentErrMsg|aclrt.*|aclmdlRI.*"),
    ("base", Some("Base"), "acl(Create|Destroy|SetAclOp).*"),
    ("operators", Some("Operators"), "aclnn.*"),
    ("hccl", Some("Hccl"), "Hccl.*"),
];

pub(crate) fn bindgen(args: &BindgenArgs) -> Result {
    require("`cargo xtask bindgen`", NEEDS)?;
    let folder = root().join("kvbackend-ascend");
    let (header, committed, made) =
        (folder.join("ffi/ascend.h"), folder.join("src/bindings"), root().join("target/bindings"));
    create_folder(&made)?;
    let mut different = Vec::new();
    for (name, table, share) in FILES {
        let file = made.join(format!("{name}.rs"));
        make(&header, &file, table.is_some(), share)?;
        let mut new = read(&file)?;
        if let Some(table) = table {
            new = new.replacen("unsafe extern \"C\" {", &format!("table! {{ {table},"), 1);
        }
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
    println!("{} of {} binding files changed", different.len(), FILES.len());
    Ok(())
}

/// Generates one binding file, either of functions or of everything else.
fn make(header: &Path, file: &Path, functions: bool, share: &str) -> Result {
    let mut command = Command::new("bindgen");
    command.arg(header).args(["--no-layout-tests", "--no-doc-comments", "--no-prepend-enum-name"]);
    command.args(["--use-core", "--rust-target", "1.89", "--rust-edition", "2024"]);
    if functions {
        command.args(["--merge-extern-blocks", "--no-recursive-allowlist", "--allowlist-function", share]);
        command.args(["--raw-line", "use super::types::*;"]);
    } else {
        command.args(["--ignore-functions", "--allowlist-item", share]);
    }
    command.arg("-o").arg(file).args(["--", "-std=c11"]);
    run(&mut command, "bindgen")
}
