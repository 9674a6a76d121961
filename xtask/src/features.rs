//! Checks combinations of the crates' features: a few in each run of CI, and all combinations, crate by
//! crate, in `deep`.

use xtask::run::{Result, cargo, none_of};

use crate::metadata::{Package, packages};

/// The features of one crate.
#[derive(Debug, Clone, PartialEq)]
struct CrateFeatures {
    name: String,
    /// All features except `default`, which only enables other features.
    features: Vec<String>,
}

/// Lints the workspace without features, then with one feature of each crate at a time. (Another check lints
/// it with all features.) Crates that a feature does not affect are not compiled again.
pub(crate) fn few() -> Result {
    few_of(&crates_of(packages()?)).iter().try_for_each(|features| {
        println!("check:   {}", if features.is_empty() { "no feature" } else { features });
        clippy(&format!("--workspace --no-default-features --features={features}"))
    })
}

/// Lints each crate alone, in every combination of its features. Built alone, a crate cannot rely on features
/// that another crate enables in a shared dependency.
pub(crate) fn all() -> Result {
    let mut failed = Vec::new();
    for CrateFeatures { name, features } in crates_of(packages()?) {
        for features in powerset(&features) {
            println!("features: {name} [{features}]");
            if clippy(&format!("-p {name} --no-default-features --features={features}")).is_err() {
                failed.push(format!("{name} [{features}]"));
            }
        }
    }
    none_of("failed", &failed)
}

fn clippy(args: &str) -> Result {
    cargo(&format!("clippy --release --quiet {args} -- -D warnings"))
}

/// Returns lists of `crate/feature` to lint with. The first list is empty. Each later list has the next
/// feature of every crate that has features left.
fn few_of(crates: &[CrateFeatures]) -> Vec<String> {
    let most = crates.iter().map(|c| c.features.len()).max().unwrap_or(0);
    let of = |i: usize| {
        let one = |c: &CrateFeatures| c.features.get(i).map(|feature| format!("{}/{feature}", c.name));
        crates.iter().filter_map(one).collect::<Vec<_>>().join(",")
    };
    std::iter::once(String::new()).chain((0..most).map(of)).collect()
}

/// Returns all subsets, each as a comma-separated string.
fn powerset(features: &[String]) -> Vec<String> {
    let subset = |bits: usize| {
        let chosen = features.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1);
        chosen.map(|(_, feature)| feature.as_str()).collect::<Vec<_>>().join(",")
    };
    (0..1 << features.len()).map(subset).collect()
}

fn crates_of(packages: Vec<Package>) -> Vec<CrateFeatures> {
    let of = |package: Package| {
        let features = package.features.into_iter().map(|(name, _)| name).filter(|name| name != "default");
        CrateFeatures { name: package.name, features: features.collect() }
    };
    packages.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, features: &[&str]) -> CrateFeatures {
        CrateFeatures { name: name.to_owned(), features: features.iter().map(|f| (*f).to_owned()).collect() }
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
        let parsed = crate::metadata::parsed(text.as_bytes()).map(crates_of);
        assert_eq!(parsed, Ok(vec![of("a", &["cpu", "gpu"])]));
        assert!(crate::metadata::parsed(b"{}").is_err());
    }
}
