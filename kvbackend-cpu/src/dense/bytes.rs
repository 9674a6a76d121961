//! Shared weight bytes, in memory or in a mapped file.

use std::fmt;
use std::fs::File;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Bytes that can be shared without copying: a vector, or a mapped file.
///
/// ```
/// use kvbackend_cpu::dense::SharedBytes;
/// let all = SharedBytes::from(vec![1, 2, 3, 4]);
/// let middle = all.part(1..3).unwrap();
/// drop(all);
/// assert_eq!(middle[..], [2, 3]);
/// assert!(middle.part(1..3).is_none());
/// ```
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    // Decision: docs/decisions/models.md#large-weight-files-stay-mapped
    /// Maps a file. Pages are read on demand and shared with other processes.
    ///
    /// # Safety
    /// The file must not change while the bytes are in use. Otherwise the bytes change too, and reading past
    /// the end of a truncated file kills the process.
    ///
    /// # Errors
    /// Returns the system's error.
    pub unsafe fn map(file: &File) -> std::io::Result<Self> {
        if file.metadata()?.len() == 0 {
            return Ok(Vec::new().into());
        }
        // SAFETY: the caller guarantees that the file does not change.
        let mapped = unsafe { memmap2::Mmap::map(file)? };
        let range = 0..mapped.len();
        Ok(Self { owner: Arc::new(mapped), range })
    }

    /// Returns a range of the bytes, or `None` if the range is out of bounds.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let range = self.range.start + range.start..self.range.start + range.end;
        Some(Self { owner: Arc::clone(&self.owner), range })
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(bytes), range }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({})", self.range.len())
    }
}

impl PartialEq for SharedBytes {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl Eq for SharedBytes {}
