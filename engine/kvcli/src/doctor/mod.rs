//! `kvc doctor`: examines a disk, a server, or answers.

use crate::args::{DoctorArgs, Examined};
use crate::error::Result;

mod answers;
mod disk;
mod server;

pub(crate) fn doctor(args: &DoctorArgs) -> Result<()> {
    match (&args.examined, &args.url) {
        (Some(Examined::Answers(args)), _) => answers::examine(args),
        (None, Some(url)) => server::examine(url, args),
        (None, None) => disk::doctor(args),
    }
}
