//! Measures how long it takes to find registered documents in a prompt, compared with reading the prompt's bytes.
//!
//! `--documents N` (default 2000) sets the number of documents, of about 5,000 bytes each, and `--prompt BYTES`
//! (default 32768) the length of the prompt, which contains five of them. Prints one JSON object per line, like
//! `kernels_against_memcpy` in `kvbench`. The limit is a search for one byte that the prompt does not contain.
//! Fails if a prompt of the default length takes a millisecond or more.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use kvcore::SystemClock;
use kvengine::{DocumentLibrary, LibraryLimits, NewDocument};
use kvlab::{Error, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The number of documents in a prompt.
const FOUND: usize = 5;
/// The number of measurements, of which the fastest is reported.
const ROUNDS: usize = 200;

fn number(name: &str, default: usize) -> usize {
    let args: Vec<String> = std::env::args().collect();
    args.iter().position(|arg| arg == name).and_then(|i| args.get(i + 1)?.parse().ok()).unwrap_or(default)
}

/// Returns text of at least `bytes` bytes.
fn words(rng: &mut StdRng, bytes: usize) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        let letters = rng.random_range(2..9);
        text.extend((0..letters).map(|_| rng.random_range('a'..='z')));
        text.push(' ');
    }
    text
}

/// Returns the time of the fastest round, in seconds.
fn fastest(mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        work();
        best = best.min(started.elapsed().as_secs_f64());
    }
    best
}

fn main() -> Result<()> {
    let (documents, length) = (number("--documents", 2000).max(FOUND), number("--prompt", 1 << 15));
    let mut slowest = 0.0_f64;
    // Documents of a collection often begin with the same lines.
    for (kind, head) in
        [("different beginnings", String::new()), ("equal beginnings", "a header ".repeat(100))]
    {
        let mut rng = StdRng::seed_from_u64(7);
        let limits = LibraryLimits { documents, bytes: usize::MAX };
        let mut library = DocumentLibrary::new(limits, Arc::new(SystemClock::default()));
        let texts: Vec<String> =
            (0..documents).map(|_| head.clone() + &words(&mut rng, 5000 - head.len())).collect();
        let started = Instant::now();
        for (number, text) in texts.iter().enumerate() {
            library.register(NewDocument::new(format!("{number}"), text.as_str()))?;
        }
        let registered = started.elapsed().as_secs_f64();
        let between = length.saturating_sub(FOUND * 5000) / (FOUND + 1);
        let mut prompt = words(&mut rng, between);
        for part in 0..FOUND {
            prompt += &texts[(part * 7919 + 13) % documents];
            prompt += &words(&mut rng, between);
        }
        let found = library.find(&prompt).len();
        if found != FOUND {
            return Err(Error::Workload(format!("{found} of {FOUND} documents were found")));
        }
        let seconds = fastest(|| {
            black_box(library.find(black_box(&prompt)));
        });
        let limit = fastest(|| {
            black_box(black_box(prompt.as_bytes()).contains(&b'!'));
        });
        slowest = slowest.max(seconds);
        let bytes: usize = texts.iter().map(String::len).sum();
        let row = serde_json::json!({
            "what": format!("find {FOUND} of {documents} documents, {kind}"), "size": prompt.len(), "unit": "bytes",
            "seconds": seconds, "limit": "search for one byte", "limit_seconds": limit, "ratio": limit / seconds,
            "registered_bytes": bytes, "seconds_to_register": registered,
        });
        println!("{row}");
    }
    if length == 1 << 15 && slowest >= 1e-3 {
        return Err(Error::Workload(format!("{:.2} ms for one prompt", slowest * 1e3)));
    }
    Ok(())
}
