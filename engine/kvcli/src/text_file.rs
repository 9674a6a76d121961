//! Reads the text files that options name. A file may be a pipe, but it must end.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The largest number of bytes in a text file.
const MOST: u64 = 256 << 20;

/// Reads a text file, a pipe or a device.
pub(crate) fn read(path: &Path) -> Result<String> {
    up_to(path, MOST)
}

fn up_to(path: &Path, most: u64) -> Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let reason = format!("it has more than {} MiB; name a shorter file", most >> 20);
        return Err(Error::new(ErrorKind::InvalidInput, reason));
    }
    String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_an_error() {
        let path = std::env::temp_dir().join(format!("kvc-text-{}", std::process::id()));
        std::fs::write(&path, "é".repeat(10)).unwrap();
        assert_eq!(up_to(&path, 20).unwrap().len(), 20);
        assert!(up_to(&path, 19).unwrap_err().to_string().contains("more than 0 MiB"));
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::InvalidData);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::NotFound);
        #[cfg(unix)]
        assert!(up_to(Path::new("/dev/zero"), 1 << 20).unwrap_err().to_string().contains("more than 1 MiB"));
    }
}
