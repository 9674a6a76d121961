//! Programs to build on. Run one with `cargo run --release --example NAME`:
//!
//! - `chunk_reuse`: documents reused in another order, and the attention over them.
//! - `paged_decode`: decoding over a paged cache, with prefix sharing, a fork and a rollback.
//! - `continuous_batching`: an engine in 200 lines, with shared prefixes, preemption, and drafts that are
//!   rolled back.
//! - `own_backend`: a backend of your own, on one page.
//!
//! The library itself is empty.

#[cfg(test)]
mod tests {
    /// The excerpt in this folder's README must stay equal to the program that it is taken from.
    #[test]
    fn every_line_of_the_readmes_excerpt_stands_in_chunk_reuse() {
        let program = include_str!("chunk_reuse.rs");
        let (_, rest) = include_str!("README.md").split_once("```rust\n").expect("a Rust block");
        let (excerpt, _) = rest.split_once("```").expect("the end of the block");
        for line in excerpt.lines() {
            let code = line.split(" // ").next().unwrap_or(line).trim();
            assert!(program.contains(code), "chunk_reuse.rs has no line {code:?}");
        }
    }
}
