//! The layers ("storeys") of the workspace: the library at the root, `engine/` on top of it, `proof/` on top
//! of both, and `xtask` and `examples`, which nothing else may use.

use xtask::run::{Result, none_of, root};

use crate::metadata::{Package, packages};

/// The crates in `engine/` that may depend on a crate in `proof/`: the program and the Python module evaluate
/// reuse, and the program loads servers.
const EXCEPTIONS: [(&str, &str); 3] = [("kvcli", "kvlab"), ("kvcli", "kvload"), ("kvpy", "kvlab")];

/// A storey of the workspace. Lower storeys come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Storey {
    Library,
    Engine,
    Proof,
    Tools,
}

impl Storey {
    /// Returns the storey of a crate, given its folder relative to the workspace root.
    fn of(folder: &str) -> Option<Self> {
        match folder.split('/').next()? {
            "engine" => Some(Self::Engine),
            "proof" => Some(Self::Proof),
            "xtask" | "examples" => Some(Self::Tools),
            _ => Some(Self::Library),
        }
    }
}

/// Checks that no crate depends on a crate in a higher storey. Tests and benchmarks may depend on any
/// crate.
pub(crate) fn check() -> Result {
    let upward = upward(&packages()?, &format!("{}/", root().display()));
    none_of("a crate depends on a crate of a higher storey (see ARCHITECTURE.md)", &upward)
}

/// Returns the dependencies on higher storeys, as `a → b`.
fn upward(packages: &[Package], root: &str) -> Vec<String> {
    let storey = |path: &str| path.strip_prefix(root).and_then(Storey::of);
    let mut upward = Vec::new();
    for package in packages {
        let Some(own) = storey(&package.manifest_path) else { continue };
        for dependency in package.dependencies.iter().filter(|d| d.kind.as_deref() != Some("dev")) {
            let higher = dependency.path.as_deref().and_then(storey).is_some_and(|other| other > own);
            if higher && !EXCEPTIONS.contains(&(package.name.as_str(), dependency.name.as_str())) {
                upward.push(format!("{} → {}", package.name, dependency.name));
            }
        }
    }
    upward
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, folder: &str, dependencies: &[(&str, &str, Option<&str>)]) -> serde_json::Value {
        let dependency = |&(name, folder, kind): &(&str, &str, Option<&str>)| serde_json::json!({"name": name, "path": format!("/w/{folder}"), "kind": kind});
        let dependencies: Vec<_> = dependencies.iter().map(dependency).collect();
        serde_json::json!({"name": name, "manifest_path": format!("/w/{folder}/Cargo.toml"), "dependencies": dependencies})
    }

    fn upward_of(packages: &[serde_json::Value]) -> Vec<String> {
        let metadata = serde_json::json!({"packages": packages}).to_string();
        upward(&crate::metadata::parsed(metadata.as_bytes()).unwrap(), "/w/")
    }

    #[test]
    fn a_dependency_on_a_higher_storey_is_named() {
        let packages = [
            package("kvchunk", "kvchunk", &[("kvcore", "kvcore", None), ("kvmodel", "engine/kvmodel", None)]),
            package(
                "kvengine",
                "engine/kvengine",
                &[("kvchunk", "kvchunk", None), ("kvlab", "proof/kvlab", None)],
            ),
            package("kvcore", "kvcore", &[("kvbench", "proof/kvbench", Some("build"))]),
            package("kvlab", "proof/kvlab", &[("xtask", "xtask", None)]),
        ];
        assert_eq!(
            upward_of(&packages),
            ["kvchunk → kvmodel", "kvengine → kvlab", "kvcore → kvbench", "kvlab → xtask"]
        );
    }

    #[test]
    fn tests_exceptions_and_the_highest_storey_may_depend_on_anything() {
        let packages = [
            package("kvcore", "kvcore", &[("kvconform", "proof/kvconform", Some("dev"))]),
            package("kvcli", "engine/kvcli", &[("kvlab", "proof/kvlab", None)]),
            package("kvlab", "proof/kvlab", &[("kvengine", "engine/kvengine", None)]),
            package("xtask", "xtask", &[("kvlab", "proof/kvlab", None)]),
        ];
        assert_eq!(upward_of(&packages), [""; 0]);
    }
}
