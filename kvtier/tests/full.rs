//! A disk that is smaller than the limit: the error says so, nothing stays reserved, and a smaller limit works.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, File};
use std::path::Path;

use common::{load, record, scope};
use kvtier::{Slab, SlabConfig};

/// A file system in memory, which knows at once that it has too little room. Other file systems would be filled first.
const SMALL: &str = "/dev/shm";

/// The number that identifies a file system in memory.
const TMPFS: i64 = 0x0102_1994;

#[test]
fn a_limit_above_the_size_of_the_disk_is_an_error_that_reserves_nothing() {
    let about = match rustix::fs::statfs(SMALL) {
        Ok(about) if about.f_type == TMPFS && about.f_blocks > 0 => about,
        about => {
            // No program that could be installed would change it, so this never counts as a failure.
            println!("SKIPPED: {SMALL} is not a file system in memory with a size: {about:?}");
            return;
        }
    };
    let size = about.f_blocks * about.f_bsize as u64;
    let folder = tempfile::tempdir_in(SMALL).unwrap();
    let config = |limit| SlabConfig { limit, ..SlabConfig::default() };
    let open = |limit| Slab::open(folder.path(), scope(), config(limit));
    let full = open(size + (1 << 30)).unwrap_err().to_string();
    assert!(full.contains("cannot reserve the disk tier's limit in"), "{full}");
    assert!(full.contains("No space left on device"), "{full}");
    assert_eq!(reserved(folder.path()), 0, "the file takes room although it was refused");
    let kept = record(1, 9_000);
    let slab = open(4 << 20).unwrap();
    slab.store(kept.clone());
    drop(slab);
    // A larger limit that does not fit loses nothing that is stored.
    open(size + (1 << 30)).unwrap_err();
    let slab = open(4 << 20).unwrap();
    assert_eq!(load(&slab, &kept.id).unwrap(), kept.buffers);
}

/// Returns the number of bytes that the files in a folder take.
fn reserved(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let blocks = |entry: fs::DirEntry| File::open(entry.path()).unwrap().metadata().unwrap().blocks();
    fs::read_dir(folder).unwrap().map(|entry| blocks(entry.unwrap()) * 512).sum()
}
