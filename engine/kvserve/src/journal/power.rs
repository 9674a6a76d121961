//! Losses of power: a journal whose disk has lost, wholly or in part, what was not synced.
//!
//! While a test records, every change of the journal's disk is noted. A loss of power after the n-th change leaves all
//! that was synced before. Of each later write, any of its sectors of 512 bytes may be on the disk; of the later cuts,
//! new names, renames and removals, any one may be, in their order.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::line::Registration;
use super::*;

const SECTOR: usize = 512;

/// A change of the disk. Files are numbered in the order of their creation.
#[derive(Debug, Clone)]
enum DiskChange {
    Created { name: OsString, file: usize },
    Renamed { from: OsString, to: OsString },
    Removed { name: OsString },
    Wrote { file: usize, start: usize, bytes: Vec<u8> },
    Cut { file: usize, bytes: usize },
    Synced { file: usize },
    SyncedFolder,
}

/// The changes of a test's thread.
#[derive(Debug, Default)]
struct Recording {
    changes: Vec<DiskChange>,
    /// The last file with each number of the file system, which uses numbers again.
    files: HashMap<u64, usize>,
    /// The number of files.
    count: usize,
    /// The number of next syncs that fail and sync nothing.
    failing: usize,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

fn note(change: impl FnOnce(&mut Recording) -> DiskChange) {
    RECORDING.with_borrow_mut(|recording| {
        if let Some(recording) = recording {
            let change = change(recording);
            recording.changes.push(change);
        }
    });
}

fn name(path: &Path) -> OsString {
    path.file_name().unwrap().to_owned()
}

impl Recording {
    fn number(&self, file: &File) -> usize {
        self.files[&file.metadata().unwrap().ino()]
    }
}

pub(super) fn created(path: &Path, file: &File) {
    note(|recording| {
        let number = recording.count;
        recording.count += 1;
        recording.files.insert(file.metadata().unwrap().ino(), number);
        DiskChange::Created { name: name(path), file: number }
    });
}

pub(super) fn wrote(file: &File, start: u64, bytes: &[u8]) {
    note(|recording| DiskChange::Wrote {
        file: recording.number(file),
        start: start as usize,
        bytes: bytes.to_vec(),
    });
}

pub(super) fn cut(file: &File, bytes: u64) {
    note(|recording| DiskChange::Cut { file: recording.number(file), bytes: bytes as usize });
}

pub(super) fn syncs(file: &File) -> io::Result<()> {
    let fails = RECORDING.with_borrow_mut(|recording| {
        let Some(failing) = recording.as_mut().map(|recording| &mut recording.failing) else { return false };
        let fails = *failing > 0;
        *failing = failing.saturating_sub(1);
        fails
    });
    if fails {
        return Err(io::Error::other("a sync that fails"));
    }
    note(|recording| DiskChange::Synced { file: recording.number(file) });
    Ok(())
}

pub(super) fn renamed(from: &Path, to: &Path) {
    note(|_| DiskChange::Renamed { from: name(from), to: name(to) });
}

pub(super) fn removed(path: &Path) {
    note(|_| DiskChange::Removed { name: name(path) });
}

pub(super) fn synced_folder() {
    note(|_| DiskChange::SyncedFolder);
}

/// A file on a disk: the bytes that are safe, and the changes that are not.
#[derive(Debug, Default, Clone)]
struct LossyFile {
    bytes: Vec<u8>,
    open: Vec<DiskChange>,
}

impl LossyFile {
    fn write(&mut self, start: usize, bytes: &[u8]) {
        let end = start + bytes.len();
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[start..end].copy_from_slice(bytes);
    }

    /// Applies the open changes. `is_kept` says for each cut and for each sector of a write whether it is on the disk.
    fn settle(&mut self, mut is_kept: impl FnMut() -> bool) {
        for change in std::mem::take(&mut self.open) {
            match change {
                DiskChange::Cut { bytes, .. } if is_kept() => self.bytes.resize(bytes, 0),
                DiskChange::Wrote { mut start, bytes, .. } => {
                    let mut rest = &bytes[..];
                    while !rest.is_empty() {
                        let (sector, more) = rest.split_at(rest.len().min(SECTOR - start % SECTOR));
                        if is_kept() {
                            self.write(start, sector);
                        }
                        (start, rest) = (start + sector.len(), more);
                    }
                }
                _ => {}
            }
        }
    }
}

/// A name that goes, and a name that a file gets.
type NameChange = (Option<OsString>, Option<(OsString, usize)>);

/// A folder on a disk: the names that are safe, and the changes of names that are not.
#[derive(Debug, Default, Clone)]
struct LossyDisk {
    files: Vec<LossyFile>,
    names: HashMap<OsString, usize>,
    /// Names that go, and names that files get, each with all changes of one call.
    open: Vec<NameChange>,
    /// The names as a running program sees them.
    seen: HashMap<OsString, usize>,
}

/// Applies a change of names.
fn rename_in(names: &mut HashMap<OsString, usize>, (gone, new): NameChange) {
    if let Some(gone) = gone {
        names.remove(&gone);
    }
    names.extend(new);
}

impl LossyDisk {
    /// Returns a disk on which these files are safe.
    fn with(files: &[(&str, &[u8])]) -> Self {
        let mut disk = Self::default();
        for (at, (name, bytes)) in files.iter().enumerate() {
            disk.files.push(LossyFile { bytes: bytes.to_vec(), open: Vec::new() });
            disk.names.insert((*name).into(), at);
        }
        disk.seen.clone_from(&disk.names);
        disk
    }

    fn apply(&mut self, change: &DiskChange) {
        let names = match change {
            DiskChange::Created { name, file } => {
                self.files.resize(self.files.len().max(file + 1), LossyFile::default());
                (None, Some((name.clone(), *file)))
            }
            DiskChange::Renamed { from, to } => (Some(from.clone()), Some((to.clone(), self.seen[from]))),
            DiskChange::Removed { name } => (Some(name.clone()), None),
            DiskChange::Wrote { file, .. } | DiskChange::Cut { file, .. } => {
                return self.files[*file].open.push(change.clone());
            }
            DiskChange::Synced { file } => return self.files[*file].settle(|| true),
            DiskChange::SyncedFolder => {
                return self.open.drain(..).for_each(|change| rename_in(&mut self.names, change));
            }
        };
        rename_in(&mut self.seen, names.clone());
        self.open.push(names);
    }

    /// Loses power. `seed` chooses what of the open changes is on the disk: nothing, everything, or some of it.
    fn lose_power(mut self, seed: u64) -> Vec<(OsString, Vec<u8>)> {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut is_kept = || match seed {
            0 => false,
            1 => true,
            _ => rng.random_range(0..2) == 0,
        };
        for change in std::mem::take(&mut self.open) {
            if is_kept() {
                rename_in(&mut self.names, change);
            }
        }
        self.files.iter_mut().for_each(|file| file.settle(&mut is_kept));
        self.names
            .into_iter()
            .map(|(name, file)| (name, std::mem::take(&mut self.files[file].bytes)))
            .collect()
    }
}

/// A journal whose disk is recorded.
struct Recorded {
    folder: tempfile::TempDir,
    disk: LossyDisk,
    /// The number of changes of the disk, and the documents from then on.
    states: Vec<(usize, Vec<String>)>,
}

impl Recorded {
    /// Begins with these files, whose documents are `ids`.
    fn with(files: &[(&str, &[u8])], ids: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut recording = Recording { count: files.len(), ..Recording::default() };
        for (number, (name, bytes)) in files.iter().enumerate() {
            let path = folder.path().join(name);
            fs::write(&path, bytes).unwrap();
            recording.files.insert(fs::metadata(&path).unwrap().ino(), number);
        }
        RECORDING.set(Some(recording));
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        Self { folder, disk: LossyDisk::with(files), states: vec![(0, ids)] }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(NAME)
    }

    /// Notes that from now on, the journal promises these documents.
    fn promise(&mut self, ids: &[&str]) {
        let count = RECORDING.with_borrow(|recording| recording.as_ref().unwrap().changes.len());
        self.states.push((count, ids.iter().map(|id| (*id).to_owned()).collect()));
    }

    /// Makes the next syncs fail.
    fn fail_syncs(count: usize) {
        RECORDING.with_borrow_mut(|recording| recording.as_mut().unwrap().failing = count);
    }

    /// Loses power after each change, in several ways, and opens the journal again: its documents must be those that it
    /// promised last, or those of the change that it was making. `check` gets the folder.
    fn lose_power_everywhere(self, check: impl Fn(&Path)) {
        let Recorded { mut disk, states, folder } = self;
        drop(folder);
        let changes = RECORDING.take().unwrap().changes;
        for end in 0..=changes.len() {
            if let Some(change) = end.checked_sub(1).map(|last| &changes[last]) {
                disk.apply(change);
            }
            let last = states.iter().rposition(|(count, _)| *count <= end).unwrap();
            let expected = [Some(&states[last]), states.get(last + 1)].map(|state| state.map(|(_, ids)| ids));
            for seed in 0..24 {
                let place = tempfile::tempdir().unwrap();
                for (name, bytes) in disk.clone().lose_power(seed) {
                    fs::write(place.path().join(name), bytes).unwrap();
                }
                let what = || format!("change {end} of {changes:?}, seed {seed}");
                let journal = Journal::open(&place.path().join(NAME));
                let mut journal = journal.unwrap_or_else(|error| panic!("{error}: {}", what()));
                let mut ids = Vec::new();
                journal.for_each(false, |one| ids.push(one.id.into_owned())).unwrap();
                assert!(expected.contains(&Some(&ids)), "{ids:?} instead of {expected:?}: {}", what());
                check(place.path());
            }
        }
    }
}

const NAME: &str = "documents.jsonl";

/// Returns a document whose line has about so many bytes.
fn registered(id: &str, bytes: usize) -> Change<'static> {
    Change::Registered(Registration {
        tenant: None,
        id: id.to_owned().into(),
        title: None,
        text: id.repeat(bytes).into(),
        system: None,
        expires: None,
        ttl: None,
    })
}

fn removed_document(id: &'static str) -> Change<'static> {
    Change::Removed { tenant: None, id: id.into() }
}

/// Returns a whole file with these documents.
fn file_with(changes: &[Change<'_>]) -> Vec<u8> {
    let lines = changes.iter().map(|change| change.written().unwrap());
    [FirstLine::written()].into_iter().chain(lines).collect::<String>().into_bytes()
}

#[test]
fn what_was_answered_is_there_after_any_loss_of_power() {
    let mut recorded = Recorded::with(&[], &[]);
    let mut journal = Journal::open(&recorded.path()).unwrap();
    for (change, ids) in [
        (registered("a", 10), &["a"][..]),
        (registered("b", 3000), &["a", "b"]),
        (registered("c", 600), &["a", "b", "c"]),
        (removed_document("a"), &["b", "c"]),
        (registered("d", 1), &["b", "c", "d"]),
    ] {
        journal.append(&change).unwrap();
        recorded.promise(ids);
    }
    // The file is replaced, and the lines behind are in the new one.
    journal.compact().unwrap();
    journal.append(&registered("e", 700)).unwrap();
    recorded.promise(&["b", "c", "d", "e"]);
    drop(journal);
    // The next server replaces it as well, and changes it at once.
    let mut journal = Journal::open(&recorded.path()).unwrap();
    journal.append(&removed_document("b")).unwrap();
    recorded.promise(&["c", "d", "e"]);
    drop(journal);
    let mut journal = Journal::open(&recorded.path()).unwrap();
    journal.append(&registered("f", 2000)).unwrap();
    recorded.promise(&["c", "d", "e", "f"]);
    recorded.lose_power_everywhere(|_| ());
}

#[test]
fn what_was_refused_is_gone_whatever_a_loss_of_power_leaves() {
    let mut recorded = Recorded::with(&[], &[]);
    let mut journal = Journal::open(&recorded.path()).unwrap();
    journal.append(&registered("a", 300)).unwrap();
    recorded.promise(&["a"]);
    Recorded::fail_syncs(1);
    journal.append(&registered("refused", 20)).unwrap_err();
    // Until then, it may have been there.
    recorded.promise(&["a", "refused"]);
    recorded.promise(&["a"]);
    journal.append(&registered("b", 5)).unwrap();
    recorded.promise(&["a", "b"]);
    recorded.lose_power_everywhere(|_| ());
}

#[test]
fn a_torn_line_is_in_the_journal_or_beside_it_after_any_loss_of_power() {
    let whole = file_with(&[registered("a", 40), registered("b", 500)]);
    let torn = &registered("torn", 400).written().unwrap().into_bytes()[..1300];
    let file = [&whole[..], torn].concat();
    for is_compacted in [true, false] {
        let recorded = Recorded::with(&[(NAME, &file)], &["a", "b"]);
        // A folder of this name cannot be replaced by a file, so the journal goes on with its own.
        let obstacle = recorded.folder.path().join(format!("{NAME}.new"));
        if !is_compacted {
            fs::create_dir(&obstacle).unwrap();
        }
        let mut journal = Journal::open(&recorded.path()).unwrap();
        assert_eq!(journal.has_rest, !is_compacted);
        // The next change begins with this.
        journal.mend().unwrap();
        recorded.lose_power_everywhere(|folder| {
            assert_eq!(fs::read(folder.join(format!("{NAME}.torn"))).unwrap(), torn);
        });
    }
}

#[test]
fn the_end_of_a_line_is_on_the_disk_before_the_next_line() {
    // The missing end is the last byte of its sector, so that the next line is in other sectors.
    let file = (1..SECTOR).find_map(|bytes| {
        let mut file = file_with(&[registered("a", 40), registered("b", bytes)]);
        file.pop();
        (file.len() % SECTOR == SECTOR - 1).then_some(file)
    });
    let mut recorded = Recorded::with(&[(NAME, &file.unwrap())], &["a", "b"]);
    let mut journal = Journal::open(&recorded.path()).unwrap();
    journal.append(&registered("c", 100)).unwrap();
    recorded.promise(&["a", "b", "c"]);
    recorded.lose_power_everywhere(|_| ());
}
