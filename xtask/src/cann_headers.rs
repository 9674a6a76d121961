//! CANN's headers, and a crate that declares its functions. Both come from registries and are not part of
//! this repository.

use std::path::PathBuf;

use crate::run::root;
use crate::tools::Tool;

/// The `torch_npu` wheels, each with the CANN version that its headers belong to.
pub const WHEELS: [(&str, &str); 2] = [("2.5.1", "CANN 8.1.RC1"), ("2.7.1", "CANN 8.3.RC1")];

/// The crate that declares CANN's functions in Rust, and its version.
pub const CRATE: (&str, &str) = ("cann-sys", "0.1.3");

/// The folder of the headers, relative to the workspace root.
pub const FOLDER: &str = "target/ascend-headers";

/// The tools that `cargo xtask ascend-headers` needs: a C++ compiler, and the headers, from wheels.
pub const NEEDS: &[Tool] = &[
    Tool::Program("g++", "g++"),
    Tool::Program("python3", "python3"),
    Tool::Made { name: "headers of CANN", is_here, bring },
];

fn is_here() -> bool {
    WHEELS.iter().all(|(version, _)| folders(version)[0].join("acl/acl.h").is_file())
        && crate_folder().join("lib.rs").is_file()
}

/// Returns the command that downloads the headers. On any machine, it downloads the wheels for one fixed
/// Python version and processor.
fn bring() -> String {
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

/// Returns the folder of the crate's source code.
pub fn crate_folder() -> PathBuf {
    root().join(FOLDER).join("crate/vendor").join(CRATE.0).join("src")
}

/// Returns the include folders of a wheel.
pub fn folders(version: &str) -> [PathBuf; 3] {
    let all = root().join(FOLDER).join(version).join("torch_npu/include");
    [all.join("third_party/acl/inc"), all.join("third_party/hccl/inc"), all]
}
