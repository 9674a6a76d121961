//! A file of records: what is read is what was written, or an error that names the file.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::{record, scope};
use kvcore::KeyScope;
use kvtier::{Error, Record, RecordNote, RecordReader, RecordWriter};

const PAGE: usize = 4096;

/// Records of several sizes: within a page, of whole pages, and of more pages than are written together.
fn records() -> Vec<Record> {
    let sizes = [10, PAGE - 4 * 17 - 4, 3 * PAGE, 700_001, 0];
    let note = RecordNote { parent: Some(scope()), ..RecordNote::default() };
    (0..).zip(sizes).map(|(number, size)| Record { note, ..record(number, size) }).collect()
}

fn write(path: &Path, records: &[Record]) -> u64 {
    let mut writer = RecordWriter::create(path, scope()).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.finish().unwrap()
}

fn read(path: &Path) -> kvtier::Result<Vec<Record>> {
    RecordReader::open(path, scope())?.collect()
}

#[test]
fn what_is_read_is_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.kv");
    let bytes = write(&path, &records());
    assert_eq!(bytes, fs::metadata(&path).unwrap().len());
    assert_eq!(read(&path).unwrap(), records());
    write(&path, &[]);
    assert_eq!(read(&path).unwrap(), []);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn a_file_that_is_not_finished_leaves_the_older_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.kv");
    write(&path, &records()[..1]);
    let mut writer = RecordWriter::create(&path, scope()).unwrap();
    writer.write(&records()[3]).unwrap();
    drop(writer);
    assert_eq!(read(&path).unwrap(), records()[..1]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    #[cfg(unix)]
    {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write(&link, &records()[..2]);
        assert!(link.is_symlink());
        assert_eq!(read(&path).unwrap(), records()[..2]);
    }
    let nowhere = RecordWriter::create(&folder.path().join("none/prompt.kv"), scope());
    assert!(matches!(nowhere, Err(Error::File { .. })));
    for special in [folder.path(), Path::new("/dev/null")] {
        assert!(matches!(RecordWriter::create(special, scope()), Err(Error::NotAFile { .. })));
    }
}

#[test]
fn changed_bytes_are_never_read_as_a_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.kv");
    write(&path, &records());
    let intact = fs::read(&path).unwrap();
    for at in (0..intact.len()).step_by(3001) {
        let mut bytes = intact.clone();
        bytes[at] ^= 0x40;
        fs::write(&path, &bytes).unwrap();
        let mut good = Vec::new();
        for one in RecordReader::open(&path, scope()).unwrap() {
            match one {
                Ok(record) => good.push(record),
                Err(Error::NoRecords { .. }) => assert!(at < 8, "{at}"),
                Err(Error::DamagedFile { offset, .. }) => assert!(offset <= at as u64, "{offset} {at}"),
                Err(error) => panic!("{error}"),
            }
        }
        // Only the filling after a record may change without notice.
        assert!(good == records()[..good.len()], "{at}");
    }
    for len in (0..intact.len()).step_by(PAGE / 2) {
        fs::write(&path, &intact[..len]).unwrap();
        let read: Vec<_> = RecordReader::open(&path, scope()).unwrap().collect();
        let good: Vec<_> = read.iter().map_while(|one| one.as_ref().ok()).cloned().collect();
        assert!(good == records()[..good.len()] && read.len() <= good.len() + 1, "{len}");
    }
}

#[test]
fn files_of_others_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.kv");
    write(&path, &records()[..1]);
    let other = RecordReader::open(&path, KeyScope::new("other", b"weights").root()).unwrap().next();
    assert!(matches!(other, Some(Err(Error::OtherScope { .. }))));
    fs::write(&path, "a text that somebody has written, longer than a page. ".repeat(200)).unwrap();
    assert!(matches!(read(&path), Err(Error::NoRecords { .. })));
    fs::write(&path, "short").unwrap();
    assert!(matches!(read(&path), Err(Error::NoRecords { .. })));
    assert!(matches!(read(folder.path()), Err(Error::NotAFile { .. })));
    assert!(matches!(read(Path::new("/dev/zero")), Err(Error::NotAFile { .. })));
    assert!(matches!(read(&folder.path().join("none")), Err(Error::File { .. })));
}
