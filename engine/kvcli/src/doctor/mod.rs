//! `kvc doctor`: examines a disk, or a server.

use crate::args::DoctorArgs;
use crate::error::Result;

mod disk;
mod server;

pub(crate) fn doctor(args: &DoctorArgs) -> Result<()> {
    match &args.url {
        Some(url) => server::examine(url, args),
        None => disk::doctor(args),
    }
}
