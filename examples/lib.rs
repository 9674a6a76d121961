//! Programs to start from. Run one with `cargo run --release --example NAME`:
//!
//! - `paged_decode`: decodes over a paged cache, with prefix sharing, a fork and a rollback.
//! - `continuous_batching`: an engine in 200 lines, with shared prefixes, preemption, and drafts that are rolled back.
//! - `chunk_reuse`: documents reused in another order, and the attention over them.
//! - `own_backend`: a backend of your own, in a page.
//!
//! The library itself is empty.
