//! Fuzzes what comes from model files and clients: chat templates, `tokenizer.json` with streams of its tokens, and
//! requests.
//!
//! Each case is drawn from a seed. A case fails if it panics where an error was due, takes longer than
//! [`LONGEST`] or more than [`MOST_MEMORY`], or leaves something held. The input of the running case is in
//! `target/fuzz/`, so that it is known even after a crash of the process.
//!
//! ```text
//! cargo run --release --all-features --example fuzz -- --seconds 120             cases from a seed of the clock
//! cargo run --release --all-features --example fuzz -- --seed 7 --cases 1        one case again
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Parser, ValueEnum};
use rand::SeedableRng;
use rand::rngs::StdRng;

mod requests;
mod templates;
mod tokenizers;

/// The longest time that a case may take.
const LONGEST: Duration = Duration::from_secs(60);
/// The largest memory that a case may take at a time, in bytes.
const MOST_MEMORY: u64 = 1 << 30;

/// Fuzz chat templates, tokenizers and requests.
#[derive(Parser)]
struct Fuzz {
    /// Stop after this many seconds.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// The first case's seed; by default from the clock.
    #[arg(long)]
    seed: Option<u64>,
    /// Stop after this many cases of each kind.
    #[arg(long, default_value_t = u64::MAX)]
    cases: u64,
    /// Fuzz only one kind of input.
    #[arg(long)]
    only: Option<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Kind {
    Templates,
    Tokenizers,
    Requests,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Templates, Self::Tokenizers, Self::Requests];
}

/// What a case reports. `Err` is a failure of the code under test.
type Outcome = Result<(), String>;

/// Writes the input of a case before it runs.
struct Note(PathBuf);

impl Note {
    fn write(&self, input: &[u8]) {
        // The note only helps to find a crash's input, so a full disk must not end the run.
        let _ = std::fs::write(&self.0, input);
    }
}

fn main() -> ExitCode {
    let args = Fuzz::parse();
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let first = args.seed.unwrap_or(clock);
    let folder = xtask::run::target().join("fuzz");
    if let Err(error) = std::fs::create_dir_all(&folder) {
        eprintln!("fuzz: {} cannot be created: {error}", folder.display());
        return ExitCode::FAILURE;
    }
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let mut failed = false;
    let kinds: Vec<Kind> =
        Kind::ALL.into_iter().filter(|kind| args.only.is_none_or(|only| only == *kind)).collect();
    for (i, kind) in kinds.iter().enumerate() {
        let now = Instant::now();
        let share = end.saturating_duration_since(now) / (kinds.len() - i) as u32;
        let name = format!("{kind:?}").to_lowercase();
        let note = folder.join(&name);
        match watch(*kind, first, args.cases, now + share, note.clone()) {
            Ok(cases) => println!("fuzz: {name}: {cases} cases from seed {first} on, none failed"),
            Err((seed, reason)) => {
                failed = true;
                eprintln!("fuzz: {name}: {reason}");
                eprintln!(
                    "fuzz: the input is in {}; again: --only {name} --seed {seed} --cases 1",
                    note.display()
                );
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs the cases of a kind in a thread, and fails if one of them does not end. Returns the number of cases.
fn watch(kind: Kind, first: u64, cases: u64, end: Instant, note: PathBuf) -> Result<u64, (u64, String)> {
    let (send, ended) = channel();
    thread::spawn(move || run(kind, first, cases, end, &Note(note), &send));
    let mut done = 0;
    loop {
        match ended.recv_timeout(LONGEST) {
            Ok(Ok(())) => done += 1,
            Ok(Err(reason)) => return Err((first.wrapping_add(done), reason)),
            Err(RecvTimeoutError::Disconnected) => return Ok(done),
            Err(RecvTimeoutError::Timeout) => {
                return Err((first.wrapping_add(done), format!("a case takes longer than {LONGEST:?}")));
            }
        }
    }
}

fn run(kind: Kind, first: u64, cases: u64, end: Instant, note: &Note, send: &Sender<Outcome>) {
    let mut requests = None;
    for case in 0..cases {
        if Instant::now() >= end {
            return;
        }
        let mut rng = StdRng::seed_from_u64(first.wrapping_add(case));
        let mut outcome = Ok(());
        let used = allocation_counter::measure(|| {
            outcome = catch_unwind(AssertUnwindSafe(|| match kind {
                Kind::Templates => templates::case(&mut rng, note),
                Kind::Tokenizers => tokenizers::case(&mut rng, note),
                Kind::Requests => requests::case(&mut rng, note, &mut requests),
            }))
            .unwrap_or_else(|_| Err("the case panicked; the message is above".to_owned()));
        });
        if used.bytes_max > MOST_MEMORY && outcome.is_ok() {
            outcome = Err(format!("a case takes {} MiB", used.bytes_max >> 20));
        }
        let failed = outcome.is_err();
        if send.send(outcome).is_err() || failed {
            return;
        }
    }
}
