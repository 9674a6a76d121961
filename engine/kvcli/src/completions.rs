//! `kvc completions`: a script with which a shell completes commands and options.

use std::io::Write;

use clap::CommandFactory as _;

use crate::args::{Cli, CompletionsArgs};
use crate::error::Result;

pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    // The library panics if its output cannot be written.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "kvc", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(())
}
