//! Combinations of the crates' features: few of them for each run of CI, all of them crate by crate for `deep`.

use std::process::Stdio;

use serde::Deserialize;

use crate::run::{Result, cargo, cargo_command};

/// A crate of the workspace.
#[derive(Debug, Clone, PartialEq)]
struct Crate {
    name: String,
    /// Without `default`, which names others.
    features: Vec<String>,
}

/// Lints the workspace with no feature, and with each feature alone. Lints with all of them are another step, and
/// crates that a feature does not reach are not compiled again.
pub(crate) fn few() -> Result {
    few_of(&crates()?).iter().try_for_each(|features| {
        println!("check:   {}", if features.is_empty() { "no feature" } else { features });
        clippy(&["--workspace", "--no-default-features", "--features", features])
    })
}

/// Lints each crate alone, in every combination of its features: what another crate asks of a shared dependency
/// does not help it.
pub(crate) fn all() -> Result {
    let mut failed = Vec::new();
    for Crate { name, features } in crates()? {
        for features in powerset(&features) {
            println!("features: {name} [{features}]");
            let args = ["-p", &name, "--no-default-features", "--features", &features];
            if clippy(&args).is_err() {
                failed.push(format!("{name} [{features}]"));
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

fn clippy(args: &[&str]) -> Result {
    cargo(&[&["clippy", "--release", "--quiet"], args, &["--", "-D", "warnings"]].concat())
}

/// Returns lists of `crate/feature`: the first is empty, each further one has one feature of every crate that has
/// so many.
fn few_of(crates: &[Crate]) -> Vec<String> {
    let most = crates.iter().map(|c| c.features.len()).max().unwrap_or(0);
    let of = |i: usize| {
        let one = |c: &Crate| c.features.get(i).map(|feature| format!("{}/{feature}", c.name));
        crates.iter().filter_map(one).collect::<Vec<_>>().join(",")
    };
    std::iter::once(String::new()).chain((0..most).map(of)).collect()
}

/// Returns all subsets, each joined by commas.
fn powerset(features: &[String]) -> Vec<String> {
    let subset = |bits: usize| {
        let chosen = features.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1);
        chosen.map(|(_, feature)| feature.as_str()).collect::<Vec<_>>().join(",")
    };
    (0..1 << features.len()).map(subset).collect()
}

fn crates() -> Result<Vec<Crate>> {
    let mut command = cargo_command(&["metadata", "--no-deps", "--format-version", "1"]);
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| format!("`cargo metadata`: {e}"))?;
    crates_of(&output.stdout)
}

fn crates_of(metadata: &[u8]) -> Result<Vec<Crate>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
        features: serde_json::Map<String, serde_json::Value>,
    }
    let metadata: Metadata =
        serde_json::from_slice(metadata).map_err(|e| format!("`cargo metadata`: {e}"))?;
    let of = |package: Package| {
        let features = package.features.into_iter().map(|(name, _)| name).filter(|name| name != "default");
        Crate { name: package.name, features: features.collect() }
    };
    Ok(metadata.packages.into_iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, features: &[&str]) -> Crate {
        Crate { name: name.to_owned(), features: features.iter().map(|f| (*f).to_owned()).collect() }
    }

    #[test]
    fn few_combinations_have_each_feature_alone_and_none() {
        let crates = [of("a", &["cpu", "gpu"]), of("b", &[]), of("c", &["gpu"])];
        assert_eq!(few_of(&crates), ["", "a/cpu,c/gpu", "a/gpu"]);
        assert_eq!(few_of(&[]), [""]);
    }

    #[test]
    fn a_powerset_has_every_subset() {
        assert_eq!(powerset(&of("a", &["x", "y"]).features), ["", "x", "y", "x,y"]);
        assert_eq!(powerset(&[]), [""]);
    }

    #[test]
    fn features_are_read_without_the_default() {
        let text = r#"{"packages":[{"name":"a","features":{"default":["cpu"],"cpu":[],"gpu":[]}}]}"#;
        assert_eq!(crates_of(text.as_bytes()), Ok(vec![of("a", &["cpu", "gpu"])]));
        assert!(crates_of(b"{}").is_err());
    }
}
