//! The journal's changes to its disk. Every change and every sync of it goes through this file, so that tests can emulate
//! a loss of power (`power.rs`).

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

#[cfg(all(test, unix))]
use super::power;

#[cfg(test)]
thread_local! {
    /// The work of somebody else while this thread syncs a file for the next time.
    pub(super) static AT_NEXT_SYNC: std::cell::RefCell<Option<Box<dyn FnOnce()>>> =
        const { std::cell::RefCell::new(None) };
}

/// A file that only its owner can read, because it contains texts of clients.
#[derive(Debug)]
pub(super) struct JournalFile(File);

impl JournalFile {
    /// Opens a file to read and to write it, or creates one.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        #[cfg(all(test, unix))]
        let is_new = !path.exists();
        let file = Self(private(OpenOptions::new().read(true).write(true).create(true)).open(path)?);
        #[cfg(all(test, unix))]
        if is_new {
            power::created(path, &file.0);
        }
        make_private(&file.0)?;
        Ok(file)
    }

    /// Creates a file instead of one that may be there. Links are not followed.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        match remove(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = private(OpenOptions::new().read(true).write(true).create_new(true)).open(path)?;
        #[cfg(all(test, unix))]
        power::created(path, &file);
        Ok(Self(file))
    }

    /// Opens a file that refuses every change.
    #[cfg(test)]
    pub(super) fn read_only(path: &Path) -> Self {
        Self(File::open(path).unwrap())
    }

    /// Returns the file to read it.
    pub(super) fn reader(&self) -> &File {
        &self.0
    }

    /// Returns the number of bytes.
    pub(super) fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    /// Returns the identity of the open file, wherever a path leads.
    pub(super) fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileIdentity::from(&self.0.metadata()?))
    }

    /// Reads so many bytes from `start` on.
    pub(super) fn read_at(&mut self, start: u64, bytes: u64) -> io::Result<Vec<u8>> {
        self.0.seek(SeekFrom::Start(start))?;
        let mut all = vec![0; bytes as usize];
        self.0.read_exact(&mut all)?;
        Ok(all)
    }

    /// Writes bytes from `start` on.
    pub(super) fn write_at(&mut self, start: u64, bytes: &[u8]) -> io::Result<()> {
        #[cfg(all(test, unix))]
        power::wrote(&self.0, start, bytes);
        self.0.seek(SeekFrom::Start(start))?;
        self.0.write_all(bytes)
    }

    /// Cuts the file, or makes it longer.
    pub(super) fn set_len(&mut self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)?;
        #[cfg(all(test, unix))]
        power::cut(&self.0, bytes);
        Ok(())
    }

    /// Makes the file's bytes and its length outlive a crash.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        #[cfg(all(test, unix))]
        power::syncs(&self.0)?;
        #[cfg(test)]
        AT_NEXT_SYNC.take().into_iter().for_each(|work| work());
        self.0.sync_data()
    }
}

/// The identity of a file, by which it is noticed that somebody else has replaced it, cut it or made it longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIdentity {
    /// The device and the number of the file on it, on systems that have such numbers.
    place: Option<(u64, u64)>,
    pub(super) bytes: u64,
}

impl FileIdentity {
    /// Returns the identity of the file that a path leads to.
    ///
    /// # Errors
    /// Returns the error from the system, also if there is no file.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&fs::metadata(path)?))
    }

    fn from(data: &Metadata) -> Self {
        #[cfg(unix)]
        let place = {
            use std::os::unix::fs::MetadataExt as _;
            Some((data.dev(), data.ino()))
        };
        #[cfg(not(unix))]
        let place = None;
        Self { place, bytes: data.len() }
    }
}

/// Gives a file the place and the name of another one.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    #[cfg(all(test, unix))]
    power::renamed(from, to);
    Ok(())
}

/// Removes a file.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    #[cfg(all(test, unix))]
    power::removed(path);
    Ok(())
}

/// Makes the names of the files in the folder of `path` outlive a crash.
#[cfg(unix)]
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    power::synced_folder();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(not(unix))]
pub(super) fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Creates files that only their owner can read.
#[cfg(unix)]
pub(super) fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt as _;
    options.mode(0o600)
}

#[cfg(not(unix))]
pub(super) fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// Takes the rights to a file that exists already from everybody but its owner.
#[cfg(unix)]
fn make_private(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    file.set_permissions(fs::Permissions::from_mode(0o600))
}

#[cfg(not(unix))]
fn make_private(_: &File) -> io::Result<()> {
    Ok(())
}
