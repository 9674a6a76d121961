//! Soaks a server: mixed traffic at saturation, with clients that vanish, and checks that nothing breaks, leaks or differs.
//!
//! The server runs in this process over the built-in model, with documents reused, several tenants and small caches.
//! Every few seconds the traffic pauses, and a checkpoint checks that nothing is held, that all threads live, that fixed
//! requests have the answers that they had at first, and how much memory the process has.
//!
//! The state is in `target/soak/state.json`, or in another folder, and the registered documents are in a file beside it. If a run is interrupted,
//! the next one with the same options goes on, and must find the documents.
//!
//! ```text
//! cargo run --release --all-features --example soak -- --seconds 600             ten minutes, from a seed of the clock
//! cargo run --release --all-features --example soak -- --seconds 36000 --seed 7  ten hours
//! ```

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use kvserve::Server;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

mod check;
mod counted;
mod idle;
mod idle_client;
mod kept;
mod requests;
mod served;
mod state;
mod tally;
mod users;

use check::Checkpoints;
use idle::IdleConnections;
use served::{KEYS, start};
use state::State;
use tally::Tally;
use users::{Place, Stop};

/// The longest time between two checkpoints.
const SEGMENT: Duration = Duration::from_secs(10);

/// The least number of times of traffic, each of which ends with a checkpoint.
const SEGMENTS: u32 = 6;

/// Soak a server in mixed traffic, and check that nothing breaks, leaks or differs.
#[derive(Parser)]
struct Soak {
    /// Stop after this many seconds of traffic, those of an interrupted run included.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The seed of the traffic; by default that of the interrupted run, or from the clock.
    #[arg(long)]
    seed: Option<u64>,
    /// The number of clients that send requests at the same time.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(8..=4096))]
    users: u64,
    /// The number of idle connections, or as many as the process may open.
    #[arg(long, default_value_t = 10_000)]
    idle: usize,
    /// The number of MiB by which the process may grow after the first third of the run, and after two minutes. In shorter
    /// runs, the number of MiB by which what is allocated may grow from the first half to the second.
    #[arg(long, default_value_t = 48)]
    growth: u64,
    /// Let only clients of one kind send requests, to find out which ones a violation needs.
    #[arg(long)]
    only: Option<Kind>,
    /// The folder for the state and the registered documents; by default `soak` in the target folder.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Be the process of the clients of idle connections to this address.
    #[arg(long, hide = true)]
    idle_client: Option<SocketAddr>,
}

/// A kind of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Clients that ask in every dialect, and send malformed requests.
    Ask,
    /// Clients that register documents.
    Register,
    /// Clients that vanish, alone and in storms.
    Vanish,
}

fn main() -> ExitCode {
    counted::limit_arenas();
    let args = Soak::parse();
    let result = match args.idle_client {
        Some(address) => idle_client::follow(address, args.idle).map(|()| true).map_err(Into::into),
        None => soak(&args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Soaks a server. Returns true if nothing was wrong.
fn soak(args: &Soak) -> Result<bool, Box<dyn std::error::Error>> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    // The files in the folder are those of one soak.
    let folder = args.folder.clone().unwrap_or_else(|| xtask::run::target().join("soak"));
    let _lock = state::lock(&folder)?;
    let (mut state, resumed) = State::resume(&folder, args.seed, clock)?;
    let tally = Arc::new(Tally::new(std::mem::take(&mut state.counts)));
    tally.count_panics();
    let files = idle::raise_limit();
    let server = start(&folder, resumed)?;
    let place = Place::new(format!("http://{}", server.address()).parse()?, Arc::clone(&tally));
    println!("seed {}; a server at {}; {files} files may be open", state.seed, server.address());
    if resumed {
        println!("going on after {:.0} seconds", state.seconds);
    }
    let runtime = Builder::new_current_thread().enable_all().build()?;
    if resumed {
        runtime.block_on(kept::remove_others(&place));
    }
    let mut checkpoints = Checkpoints::default();
    let room = idle::room(files, args.users);
    if room < args.idle {
        println!(
            "SKIPPED: {} of {} idle connections, because only {files} files may be open",
            args.idle - room,
            args.idle
        );
    }
    let mut idle = IdleConnections::start(server.address(), args.idle.min(room))?;
    let bar = bar(args.seconds);
    let total = Duration::from_secs(args.seconds);
    let segment = SEGMENT.min(total / SEGMENTS);
    let mut told = Instant::now();
    let mut opened = false;
    loop {
        // The first checkpoint remembers the answers to the fixed requests.
        checkpoints.check(&runtime, &server, &place, idle.now())?;
        state.counts = tally.counts();
        state.save()?;
        let left = total.saturating_sub(Duration::from_secs_f64(state.seconds));
        if left.is_zero() || tally.has_failed() {
            break;
        }
        if !std::mem::replace(&mut opened, true) {
            // With traffic, a busy machine may close the first of them before it has opened the last one.
            idle.open(&Stop::at(Instant::now() + idle::TO_OPEN));
        }
        let began = Instant::now();
        let stop = Stop::at(began + segment.min(left));
        std::thread::scope(|scope| {
            scope.spawn(|| idle.open(&stop));
            runtime.block_on(traffic(&place, &state, args, &stop, &bar));
        });
        idle.count_open(&tally);
        state.seconds += began.elapsed().as_secs_f64();
        state.segments += 1;
        if bar.is_hidden() && told.elapsed() > Duration::from_secs(60) {
            told = Instant::now();
            eprintln!("soak: {:.0} of {} seconds", state.seconds, args.seconds);
        }
    }
    idle.judge(&tally);
    drop(idle);
    // Idle connections of the clients keep buffers, at both ends.
    drop(place);
    checkpoints.end(&runtime, &tally);
    bar.finish_and_clear();
    checkpoints.judge(args.growth << 20, &tally);
    shut_down(server, &tally);
    println!("{}", tally.table());
    checkpoints.print(&state, args.growth);
    state.end()?;
    Ok(tally.print_violations())
}

/// Sends requests of all kinds for a while.
async fn traffic(place: &Place, state: &State, args: &Soak, stop: &Stop, bar: &ProgressBar) {
    let time = stop.left();
    let mut running = JoinSet::new();
    let seed = |user: u64| {
        let mut seeds = StdRng::seed_from_u64(state.seed ^ (state.segments << 32));
        StdRng::seed_from_u64(seeds.random::<u64>().wrapping_add(user))
    };
    for user in 0..args.users {
        let key = KEYS[user as usize % KEYS.len()].0;
        let place = place.with_key(key);
        // One of eight clients vanishes again and again, and one keeps documents registered.
        let kind = args.only.unwrap_or(match user % 8 {
            0 => Kind::Vanish,
            1 => Kind::Register,
            _ => Kind::Ask,
        });
        match kind {
            Kind::Vanish => running.spawn(users::vanish(place, seed(user), stop.clone())),
            Kind::Register => running.spawn(users::register(place, user, seed(user), stop.clone())),
            Kind::Ask => running.spawn(users::ask(place, seed(user), stop.clone())),
        };
    }
    running.spawn(users::watch(place.with_key(served::OPERATOR_KEY), stop.clone()));
    running.spawn(users::repeat(place.with_key(KEYS[0].0), stop.clone()));
    let (keeping, segment) = (place.clone(), state.segments);
    running.spawn(async move { kept::keep(&keeping, segment).await });
    if args.only.is_none_or(|only| only == Kind::Vanish) {
        running.spawn(users::storm(place.with_key(KEYS[1].0), seed(args.users), stop.clone()));
    }
    let done = state.seconds;
    while !stop.is_over() {
        bar.set_position((done + (time.as_secs_f64() - stop.left().as_secs_f64())) as u64);
        tokio::time::sleep(Duration::from_millis(200).min(stop.left())).await;
    }
    while let Some(ended) = running.join_next().await {
        if let Err(error) = ended {
            place.tally.violation(format!("a client of the soak failed: {error}"));
        }
    }
}

/// Shuts the server down, which must not take longer than an answer.
fn shut_down(server: Server, tally: &Tally) {
    let began = Instant::now();
    server.shut_down();
    let took = began.elapsed();
    if took > Duration::from_secs(20) {
        tally.violation(format!("the server without requests took {took:?} to shut down"));
    }
}

fn bar(seconds: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg:>8} {bar:30} {pos}/{len} s {eta}");
    ProgressBar::new(seconds)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        .with_message("soak")
}
