//! `kvc`: runs a language model on the caches of `kvcore`.
//!
//! Exit codes: 0 for success, 1 for a failure, 2 for wrong usage.
//!
//! - [`args`]: the command line, and its help
//! - [`run`], [`demo`], [`eval`], [`tune`], [`mod@bench`], [`warm`], [`mod@serve`], [`inspect`], [`doctor`], [`devices`]: the commands
//! - [`asking`], [`decoys`], [`way`]: the engine of `eval`, `tune` and `doctor`, and their questions; files with decoys; how
//!   documents are reused
//! - [`backend`], [`load`], [`embedded`]: devices and models
//! - [`arenas`]: the allocator
//! - [`report`], [`progress`], [`plot`], [`memory`], [`notes`]: the output
//! - [`text_file`]: files that options name
//! - [`error`]: failures, with advice

#[macro_use]
mod notes;

mod arenas;
mod args;
mod asking;
mod backend;
mod bench;
mod completions;
mod decoys;
mod demo;
mod devices;
mod doctor;
mod embedded;
mod error;
mod eval;
mod folder;
mod inspect;
mod load;
mod memory;
mod plot;
mod progress;
mod report;
mod run;
mod serve;
mod size;
mod text_file;
mod tune;
mod warm;
mod way;

use std::process::ExitCode;

use args::{Cli, Command};

fn main() -> ExitCode {
    arenas::limit();
    let cli = Cli::of_the_program();
    let result = match cli.command {
        Command::Demo(args) => demo::demo(&args),
        Command::Run(args) => run::run(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Tune(args) => tune::tune(&args),
        Command::Serve(args) => serve::serve(&args),
        Command::Warm(args) => warm::warm(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Size(args) => size::size(&args),
        Command::Completions(args) => completions::completions(&args),
        Command::Devices(args) => devices::devices(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output closed the pipe on purpose, as in `kvc demo | head -1`.
        Err(error::Error::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            note!("error: {error}");
            if let Some(hint) = error.hint() {
                note!("hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}
