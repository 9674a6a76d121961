//! Weight files: small ones are read into memory, large ones are mapped, and a mapped file that changes is noticed.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::SharedBytes;

/// The way in which weight files get into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileAccess {
    /// Files of up to [`MOST_READ`](Self::MOST_READ) bytes are read, and larger files are mapped. Pages of a mapped
    /// file are read on demand and shared with other processes, but the file must not change while its bytes are
    /// in use.
    #[default]
    MapLarge,
    /// Files of up to this many bytes are read, and larger files are mapped.
    MapOver(u64),
    /// All files are read, so that they may change later.
    Copy,
}

impl FileAccess {
    /// The size in bytes up to which [`MapLarge`](Self::MapLarge) reads files: 256 MiB.
    pub const MOST_READ: u64 = 256 << 20;
}

/// Checks that a path is a regular file. A pipe would wait for a writer when it is opened, and a device may have no
/// end.
///
/// # Errors
/// Returns the system's error, and an error that says what the path is, if it is a link without its file, a directory,
/// a pipe, a socket or a device.
pub fn check_regular_file(path: &Path) -> std::io::Result<()> {
    let wrong = |what: &str| Err(Error::new(ErrorKind::InvalidInput, what));
    let kind = match std::fs::metadata(path) {
        Ok(data) => data.file_type(),
        // An interrupted download leaves a link without its file.
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
            return wrong("it is a link to a file that does not exist; download the model again");
        }
        Err(error) => return Err(error),
    };
    if kind.is_file() {
        return Ok(());
    }
    let what = if kind.is_dir() { "a directory" } else { special(kind) };
    wrong(&format!("it is {what}, not a regular file; give the file itself"))
}

#[cfg(unix)]
fn special(kind: std::fs::FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

#[cfg(not(unix))]
fn special(_: std::fs::FileType) -> &'static str {
    "a device"
}

/// An open weight file.
#[derive(Debug)]
pub struct WeightFile {
    path: PathBuf,
    bytes: SharedBytes,
    /// The file and its state when it was mapped, or `None` if the file was read.
    mapped: Option<(File, FileState)>,
}

/// The facts that show a change of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileState {
    length: u64,
    modified: Option<SystemTime>,
}

impl FileState {
    fn of(file: &File) -> std::io::Result<Self> {
        let data = file.metadata()?;
        Ok(Self { length: data.len(), modified: data.modified().ok() })
    }
}

impl WeightFile {
    /// Opens a file, and reads or maps it.
    ///
    /// # Errors
    /// Returns the system's error, and an error for a path that is not a regular file.
    pub fn open(path: &Path, access: FileAccess) -> std::io::Result<Self> {
        let most_read = match access {
            FileAccess::MapLarge => FileAccess::MOST_READ,
            FileAccess::MapOver(most_read) => most_read,
            FileAccess::Copy => u64::MAX,
        };
        check_regular_file(path)?;
        let mut file = File::open(path)?;
        let state = FileState::of(&file)?;
        let path = path.to_owned();
        if state.length <= most_read {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            return Ok(Self { path, bytes: bytes.into(), mapped: None });
        }
        // SAFETY: nothing in this process changes the file, and `has_changed` notices other processes that do.
        let bytes = unsafe { SharedBytes::map(&file)? };
        Ok(Self { path, bytes, mapped: Some((file, state)) })
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file's bytes.
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Returns true if the file is mapped and has another length or modification time than when it was mapped. Its
    /// bytes may then have changed, and reading past a new end kills the process. A file that was replaced by
    /// another file with the same name has not changed, because the mapping keeps the old one.
    pub fn has_changed(&self) -> bool {
        let changed = |(file, state): &(File, FileState)| FileState::of(file).ok() != Some(*state);
        self.mapped.as_ref().is_some_and(changed)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;

    /// Returns a file of 8 bytes that is mapped, with its folder.
    fn mapped() -> (tempfile::TempDir, WeightFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, [7; 8]).unwrap();
        let file = WeightFile::open(&path, FileAccess::MapOver(7)).unwrap();
        assert!(file.bytes()[..] == [7; 8] && !file.has_changed());
        (folder, file)
    }

    #[test]
    fn a_mapped_file_that_changes_is_noticed() {
        let (_folder, file) = mapped();
        let other = File::options().append(true).open(file.path()).unwrap();
        other.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
        assert!(file.has_changed(), "another time");
        let (_folder, file) = mapped();
        File::options().append(true).open(file.path()).unwrap().write_all(&[1]).unwrap();
        assert!(file.has_changed(), "another length");
        let (_folder, file) = mapped();
        File::options().write(true).open(file.path()).unwrap().set_len(0).unwrap();
        assert!(file.has_changed(), "truncated");
    }

    #[test]
    fn a_file_that_was_replaced_or_removed_keeps_its_bytes() {
        let (folder, file) = mapped();
        let new = folder.path().join("new");
        std::fs::write(&new, [1; 9]).unwrap();
        std::fs::rename(&new, file.path()).unwrap();
        assert!(!file.has_changed() && file.bytes()[..] == [7; 8]);
        std::fs::remove_file(file.path()).unwrap();
        assert!(!file.has_changed() && file.bytes()[..] == [7; 8]);
    }

    #[test]
    fn a_small_file_and_a_copied_file_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        for access in [FileAccess::MapLarge, FileAccess::Copy] {
            std::fs::write(&path, [7; 8]).unwrap();
            let file = WeightFile::open(&path, access).unwrap();
            std::fs::write(&path, [1; 3]).unwrap();
            assert!(!file.has_changed() && file.bytes()[..] == [7; 8]);
        }
    }

    #[test]
    fn a_path_that_is_no_regular_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(WeightFile::open(folder.path(), FileAccess::MapLarge).is_err());
        assert!(WeightFile::open(&folder.path().join("none"), FileAccess::MapLarge).is_err());
        #[cfg(unix)]
        {
            use std::os::unix::{fs::symlink, net::UnixListener};
            let of = |name: &str| {
                WeightFile::open(&folder.path().join(name), FileAccess::Copy).unwrap_err().to_string()
            };
            symlink("/nowhere", folder.path().join("link")).unwrap();
            let _listener = UnixListener::bind(folder.path().join("socket")).unwrap();
            assert!(of("link").contains("a link to a file that does not exist"));
            assert!(of("socket").contains("a socket, not a regular file"));
            assert!(of(".").contains("a directory, not a regular file"));
            assert!(of("/dev/zero").contains("a device, not a regular file"));
        }
    }
}
