//! The parts of [`FileIo`](super::FileIo) that differ between systems.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// Opens or creates a file for reading and writing, without the page cache where the file system allows it.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        // Some file systems, such as tmpfs before Linux 6.6, refuse direct I/O.
        if let Ok(file) = options.clone().custom_flags(direct).open(path) {
            return Ok(file);
        }
    }
    options.open(path)
}

/// Extends a file to `bytes`, and reserves room on the disk where the system can.
pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes) {
        // Some file systems cannot reserve room.
        Err(rustix::io::Errno::OPNOTSUPP) => {}
        allocated => return Ok(allocated?),
    }
    file.set_len(bytes)
}

/// Fills `bytes` from the file at `offset`.
#[cfg(unix)]
pub(super) fn read(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Writes `bytes` to the file at `offset`.
#[cfg(unix)]
pub(super) fn write(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Fills `bytes` from the file at `offset`.
#[cfg(windows)]
pub(super) fn read(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_read(file, bytes, offset)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (bytes, offset) = (&mut bytes[count..], offset + count as u64);
    }
    Ok(())
}

/// Writes `bytes` to the file at `offset`.
#[cfg(windows)]
pub(super) fn write(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        (bytes, offset) = (&bytes[count..], offset + count as u64);
    }
    Ok(())
}
