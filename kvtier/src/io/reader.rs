//! A file that is only read, at once.

use std::fs::File;
use std::io;
use std::path::Path;

use super::{Direction, DiskIo, IoEnd, IoRequest, OnEnd, place};

/// A file that is only read. The caller waits for each request.
#[derive(Debug)]
pub(crate) struct ReadOnly(File);

impl ReadOnly {
    /// Opens a file that exists.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        File::open(path).map(Self)
    }
}

/// The error of everything that would change the file.
fn refused() -> io::Error {
    io::ErrorKind::ReadOnlyFilesystem.into()
}

impl DiskIo for ReadOnly {
    fn start(&self, requests: Vec<IoRequest>, on_end: OnEnd) {
        for (index, IoRequest { direction, offset, mut pages }) in requests.into_iter().enumerate() {
            let result = match direction {
                Direction::Read => place::read(&self.0, pages.bytes_mut(), offset),
                Direction::Write => Err(refused()),
            };
            on_end(IoEnd { index, pages, result });
        }
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn resize(&self, _bytes: u64) -> io::Result<()> {
        Err(refused())
    }

    fn sync(&self) -> io::Result<()> {
        Err(refused())
    }
}
