//! `cargo xtask licences`: checks the licences, bans and sources of all dependencies with cargo-deny.

use xtask::run::{Result, cargo};
use xtask::tools::{Tool, require};

pub(crate) fn licences() -> Result {
    require("`cargo xtask licences`", &[Tool::Cargo("cargo-deny")])?;
    cargo("deny --log-level error check bans licenses sources")
}
