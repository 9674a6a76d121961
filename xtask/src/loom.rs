//! `cargo xtask loom`: the concurrent paths of the block pool under every interleaving.

use crate::run::{Result, cargo_command, root, run};

pub(crate) fn loom() -> Result {
    let args = ["test", "--release", "-p", "kvcore", "--test", "loom"];
    let mut command = cargo_command(&args);
    // Its own folder: the flag would rebuild everything else.
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", root().join("target/loom"));
    run(&mut command, "cargo test (loom)")
}
