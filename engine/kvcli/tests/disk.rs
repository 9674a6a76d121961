//! `kvc run --disk`: documents that outlive the program.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;

use common::{A, B, SYSTEM, fails, json, prompt};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

#[test]
fn documents_are_found_by_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("kv").to_str().unwrap().to_owned();
    let start = |documents: [&str; 2]| {
        let ask = prompt(&[SYSTEM, documents[0], documents[1], "bora ?"]);
        json(&["--disk", &disk, "--disk-limit", "32MiB", "--recompute", "none", "--prompt", &ask])
    };
    let (first, second) = (start([A, B]), start([B, A]));
    assert_eq!((&first["disk"]["hits"], &first["disk"]["misses"]), (&0.into(), &2.into()));
    assert_eq!((&second["disk"]["hits"], &second["disk"]["misses"]), (&2.into(), &0.into()));
    assert_eq!(first["tokens"], second["tokens"]);
    let hits = second["chunks"].as_array().unwrap().iter().filter(|chunk| chunk["hit"] == true).count();
    assert_eq!(hits, 2);
    let size = fs::metadata(folder.path().join("kv/records.kvslab")).unwrap().len();
    assert!(size <= 32 << 20 && second["disk"]["limit_bytes"] == size);
}

#[test]
fn wrong_folders_and_sizes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let (file, folder) = (file.to_str().unwrap(), folder.path().to_str().unwrap());
    fails(&["run", "--disk", file, "-p", "x"], 1, "is not a folder");
    fails(&["run", "--disk", folder, "--disk-limit", "100KiB", "-p", "x"], 1, "at least");
    fails(&["run", "--disk", folder, "--disk-limit", "ten", "-p", "x"], 2, "50GiB");
    fails(&["run", "--disk-limit", "1GiB", "-p", "x"], 2, "--disk");
}
