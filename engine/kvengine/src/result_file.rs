//! Files that results are written to: opened before a result is computed, so that a mistake in a path costs no time.

use std::fs::{File, OpenOptions};
use std::io::{Result, Write};
use std::path::{Path, PathBuf};

/// A file that a result will be written to.
///
/// A regular file keeps its contents until the result is written beside it. A pipe or a device is written as it is. A pipe
/// must already have a reader: without one, opening the pipe would wait for ever.
#[derive(Debug)]
pub struct ResultFile {
    path: PathBuf,
    /// A pipe or a device. It stays open, because the reader of a pipe ends when the last writer closes the pipe.
    special: Option<File>,
}

impl ResultFile {
    /// Checks that a file can be written. A file that does not exist is not created.
    ///
    /// # Errors
    /// Returns the system's error, and an error for a named pipe that nobody reads.
    pub fn open(path: &Path) -> Result<Self> {
        let existed = path.exists();
        let file = open_to_append(path)?;
        if !file.metadata()?.is_file() {
            return Ok(Self { path: path.to_owned(), special: Some(file) });
        }
        if !existed {
            // A link without its file stays as it is.
            std::fs::remove_file(std::fs::canonicalize(path)?)?;
        }
        Ok(Self { path: path.to_owned(), special: None })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the result. If this fails, an existing regular file keeps its contents.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn write(self, text: &str) -> Result<()> {
        match self.special {
            Some(mut file) => file.write_all(text.as_bytes()),
            None => replace(&self.path, text),
        }
    }

    /// Returns the file itself, which is written at its end.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn into_appended(self) -> Result<File> {
        self.special.map_or_else(|| open_to_append(&self.path), Ok)
    }
}

/// Opens or creates a file without waiting for the reader of a pipe.
fn open_to_append(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    {
        use std::io::{Error, ErrorKind};
        use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

        use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

        let opened = options.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let file = opened.map_err(|error| {
            let is_pipe = std::fs::metadata(path).is_ok_and(|data| data.file_type().is_fifo());
            if !is_pipe || error.raw_os_error() != Some(rustix::io::Errno::NXIO.raw_os_error()) {
                return error;
            }
            Error::new(
                ErrorKind::InvalidInput,
                "it is a pipe that nobody reads; start its reader, or give a file",
            )
        })?;
        // Writing waits for a slow reader.
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok(file)
    }
    #[cfg(not(unix))]
    options.open(path)
}

/// Writes a file beside the old one, and then replaces the old one. A full disk therefore does not cost the old
/// contents.
fn replace(path: &Path, text: &str) -> Result<()> {
    let old = std::fs::metadata(path).ok();
    // A link stays a link.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut beside = path.clone().into_os_string();
    beside.push(format!(".{}.part", std::process::id()));
    let write = || {
        let mut file = File::create(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        old.map_or(Ok(()), |old| file.set_permissions(old.permissions()))?;
        std::fs::rename(&beside, &path)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, text: &str) -> Result<()> {
        ResultFile::open(path)?.write(text)
    }

    #[test]
    fn a_file_that_cannot_be_replaced_keeps_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tuned.json");
        put(&path, "old").unwrap();
        // A folder in the way of the new file.
        let beside = folder.path().join(format!("tuned.json.{}.part", std::process::id()));
        std::fs::create_dir(&beside).unwrap();
        assert!(put(&path, "new").is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        std::fs::remove_dir(&beside).unwrap();
        put(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
        assert!(put(&folder.path().join("none/tuned.json"), "new").is_err());
    }

    #[test]
    fn a_file_that_is_only_opened_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers");
        let file = ResultFile::open(&path).unwrap();
        assert!(!path.exists() && file.path() == path);
        drop(file);
        std::fs::write(&path, "old ").unwrap();
        let file = ResultFile::open(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old ");
        file.into_appended().unwrap().write_all(b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old new");
        assert!(ResultFile::open(folder.path()).is_err(), "a folder");
    }

    #[test]
    #[cfg(unix)]
    fn a_link_stays_a_link_and_a_device_stays_a_device() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("tuned.json"), folder.path().join("link"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        drop(ResultFile::open(&link).unwrap());
        assert!(link.is_symlink() && !path.exists());
        std::fs::write(&path, "old").unwrap();
        put(&link, "new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        put(Path::new("/dev/null"), "new").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    #[cfg(unix)]
    fn a_pipe_is_written_if_it_has_a_reader() {
        use std::io::Read;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        for _ in 0..2 {
            let error = ResultFile::open(&path).unwrap_err().to_string();
            assert!(error.contains("a pipe that nobody reads; start its reader"), "{error}");
        }
        // A pipe that is opened to read and write has a reader at once.
        let reader = File::options().read(true).write(true).open(&path).unwrap();
        let file = ResultFile::open(&path).unwrap();
        // More than the pipe holds, so that the writer has to wait for the reader.
        let text = "result ".repeat(50_000);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| file.write(&text));
            let mut read = vec![0; text.len()];
            (&reader).read_exact(&mut read).unwrap();
            assert_eq!(read, text.as_bytes());
            writer.join().unwrap().unwrap();
        });
        let file = ResultFile::open(&path).unwrap();
        drop(reader);
        assert_eq!(file.write("result").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(ResultFile::open(&socket).is_err(), "a socket");
    }
}
