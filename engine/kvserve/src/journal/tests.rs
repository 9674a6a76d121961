//! A journal through crashes, damage and disks that fail.

use std::cell::RefCell;
use std::io::Write as _;
use std::rc::Rc;

use super::*;

fn registered(id: &str, text: &str) -> Change<'static> {
    Change::Registered(Registration {
        tenant: Some("alice".into()),
        id: id.to_owned().into(),
        title: None,
        text: text.to_owned().into(),
        system: None,
        expires: None,
        ttl: None,
    })
}

fn expiring(id: &str, at: u64) -> Change<'static> {
    let Change::Registered(document) = registered(id, "for a while") else { panic!() };
    Change::Registered(Registration { expires: Some(at), ..document })
}

fn removed(id: &str) -> Change<'static> {
    Change::Removed { tenant: Some("alice".into()), id: id.to_owned().into() }
}

fn open(path: &Path) -> Journal {
    Journal::open(path).unwrap()
}

/// Returns the IDs and texts of all documents, in their order.
fn documents(journal: &mut Journal) -> Vec<(String, String)> {
    let mut all = Vec::new();
    journal.for_each(false, |one| all.push((one.id.into_owned(), one.text.into_owned()))).unwrap();
    all
}

fn ids(journal: &mut Journal) -> Vec<String> {
    documents(journal).into_iter().map(|(id, _)| id).collect()
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("documents.jsonl");
    (folder, path)
}

#[test]
fn documents_are_there_again_in_their_order_and_removed_and_expired_ones_are_not() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    for change in [
        registered("a", "one"),
        registered("b", "one"),
        registered("c", "two"),
        expiring("d", 50),
        expiring("e", 51),
        // The same text keeps its place, another one does not.
        registered("a", "one"),
        registered("b", "other"),
        removed("c"),
        removed("never there"),
    ] {
        journal.append(&change).unwrap();
    }
    let expected =
        [("a", "one"), ("e", "for a while"), ("b", "other")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    drop(journal);
    for _ in 0..3 {
        let mut journal = open(&path);
        assert_eq!(ids(&mut journal), ["a", "d", "e", "b"], "the clock may be wrong at the start");
        journal.expire(50);
        assert_eq!(documents(&mut journal), expected);
        // Only needed lines are left, and those that may have expired.
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2 + expected.len());
    }
}

#[test]
fn a_file_of_any_tear_in_its_last_line_has_all_other_lines() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    journal.append(&registered("a", "one")).unwrap();
    let whole = fs::read(&path).unwrap();
    journal.append(&registered("b", "two")).unwrap();
    drop(journal);
    let more = fs::read(&path).unwrap();
    let mut torn: Vec<Vec<u8>> = (whole.len()..more.len()).map(|end| more[..end].to_vec()).collect();
    // A file system may have made room for a line before its bytes.
    torn.push([&whole[..], &[0; 100]].concat());
    torn.push([&whole[..], &[0; 100], &b"}}\n"[..]].concat());
    for bytes in torn {
        fs::write(&path, &bytes).unwrap();
        let mut journal = open(&path);
        let is_whole = bytes.len() + 1 == more.len() && more.starts_with(&bytes);
        let kept: &[&str] = if is_whole { &["a", "b"] } else { &["a"] };
        assert_eq!(ids(&mut journal), kept);
        if !is_whole && bytes.len() > whole.len() {
            // Nothing is thrown away.
            assert_eq!(fs::read(beside(&path, "torn")).unwrap(), bytes[whole.len()..]);
        }
        journal.append(&registered("c", "three")).unwrap();
        drop(journal);
        assert_eq!(ids(&mut open(&path)), [kept, &["c"]].concat());
    }
}

#[test]
fn a_first_line_without_its_end_is_mended() {
    let (_folder, path) = place();
    drop(open(&path));
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.trim_end()).unwrap();
    open(&path).append(&registered("a", "one")).unwrap();
    assert_eq!(ids(&mut open(&path)), ["a"]);
}

#[test]
fn a_change_that_this_program_does_not_know_is_an_error_even_in_the_last_line() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    journal.append(&registered("a", "one")).unwrap();
    drop(journal);
    let mut line = registered("b", "two").written().unwrap();
    let rest = line.split_off(AROUND).replace("\"title\"", "").replacen("registered", "renamed", 1);
    let check = blake3::hash(rest.trim_end().as_bytes()).to_hex();
    let text = fs::read_to_string(&path).unwrap() + &format!("{{\"check\":\"{}\",{rest}", &check[..16]);
    fs::write(&path, &text).unwrap();
    let error = Journal::open(&path).unwrap_err();
    assert!(matches!(error, Error::DocumentsLine { line: 3, .. }), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
}

/// The bytes in front of what a check covers.
const AROUND: usize = "{\"check\":\"0123456789abcdef\",".len();

#[test]
fn a_file_that_somebody_changes_under_a_server_is_not_copied_wrongly() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    for id in ["a", "b"] {
        journal.append(&registered(id, "one")).unwrap();
    }
    let bytes = fs::read(&path).unwrap();
    let edited = [&bytes[..60], b"x", &bytes[60..]].concat();
    fs::write(&path, &edited).unwrap();
    assert_eq!(journal.compact().unwrap_err().kind(), io::ErrorKind::InvalidData);
    assert_eq!(fs::read(&path).unwrap(), edited);
}

/// Changes the file of a journal, whose bytes are given.
type Edit = fn(&Path, &[u8]);

/// The ways in which somebody else changes a file. Editors write a new file, or the same one.
const EDITS: [Edit; 4] = [
    |path, bytes| {
        fs::write(beside(path, "edited"), bytes).unwrap();
        fs::rename(beside(path, "edited"), path).unwrap();
    },
    |path, bytes| fs::write(path, [bytes, b"\n"].concat()).unwrap(),
    |path, bytes| fs::write(path, &bytes[..bytes.len() / 2]).unwrap(),
    |path, _| fs::remove_file(path).unwrap(),
];

#[test]
fn no_change_is_answered_that_an_edited_file_would_lose() {
    for (number, edit) in EDITS.into_iter().enumerate() {
        let (_folder, path) = place();
        let mut journal = open(&path);
        journal.append(&registered("a", "one")).unwrap();
        edit(&path, &fs::read(&path).unwrap());
        let edited = fs::read(&path).ok();
        for _ in 0..2 {
            let refused = journal.append(&registered("b", "two")).unwrap_err();
            assert!(refused.to_string().contains("restart the server"), "{number}: {refused}");
            journal.compact().unwrap_err();
        }
        assert_eq!(fs::read(&path).ok(), edited, "{number}: what somebody has written stays");
    }
}

/// Makes somebody edit a file while it, or its replacement, is synced for the next time. Returns what they leave.
fn edit_at_next_sync(path: &Path, edit: Edit) -> Rc<RefCell<Option<Vec<u8>>>> {
    let edited = Rc::new(RefCell::new(None));
    let (path, leaves) = (path.to_owned(), Rc::clone(&edited));
    disk::AT_NEXT_SYNC.set(Some(Box::new(move || {
        edit(&path, &fs::read(&path).unwrap());
        *leaves.borrow_mut() = fs::read(&path).ok();
    })));
    edited
}

#[test]
fn no_change_is_answered_during_which_somebody_edits_the_file() {
    for (number, edit) in EDITS.into_iter().enumerate() {
        let (_folder, path) = place();
        let mut journal = open(&path);
        journal.append(&registered("a", "one")).unwrap();
        let before = fs::read(&path).unwrap();
        let backup = beside(&path, "backup");
        fs::hard_link(&path, &backup).unwrap();
        let edited = edit_at_next_sync(&path, edit);
        let refused = journal.append(&registered("b", "two")).unwrap_err();
        assert!(refused.to_string().contains("restart the server"), "{number}: {refused}");
        assert!(!journal.has(&(Some("alice".into()), "b".to_owned())), "{number}");
        journal.append(&registered("c", "three")).unwrap_err();
        assert_eq!(fs::read(&path).ok(), *edited.borrow(), "{number}: what somebody has written stays");
        if number == 0 || number == 3 {
            assert_eq!(fs::read(&backup).unwrap(), before, "{number}: the refused line is cut off");
        }
    }
}

#[test]
fn a_file_that_somebody_edits_while_it_is_written_again_is_not_replaced() {
    for (number, edit) in EDITS.into_iter().enumerate() {
        let (_folder, path) = place();
        let mut journal = open(&path);
        journal.append(&registered("a", "one")).unwrap();
        let edited = edit_at_next_sync(&path, edit);
        let refused = journal.compact().unwrap_err();
        assert!(refused.to_string().contains("restart the server"), "{number}: {refused}");
        assert_eq!(fs::read(&path).ok(), *edited.borrow(), "{number}: what somebody has written stays");
        assert!(!beside(&path, "new").exists());
    }
}

#[test]
fn a_file_that_cannot_be_looked_at_is_nobodys_edit() {
    let (folder, _) = place();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let path = inner.join("documents.jsonl");
    let mut journal = open(&path);
    fs::rename(&inner, folder.path().join("elsewhere")).unwrap();
    fs::write(&inner, "").unwrap();
    let refused = journal.append(&registered("a", "one")).unwrap_err();
    let words = refused.to_string();
    assert!(words.contains("cannot look at") && !words.contains("somebody"), "{words}");
    assert_eq!(refused.kind(), io::ErrorKind::NotADirectory);
}

#[test]
fn more_space_is_advised_only_where_it_helps() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    assert_eq!(advice(&io::ErrorKind::StorageFull.into()), "; free some space");
    fs::remove_file(&path).unwrap();
    assert_eq!(advice(&journal.compact().unwrap_err()), "");
}

#[test]
fn a_damaged_line_in_the_middle_is_named_with_what_to_do() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    for id in ["a", "b", "c"] {
        journal.append(&registered(id, "text")).unwrap();
    }
    drop(journal);
    let text = fs::read_to_string(&path).unwrap();
    for damaged in [text.replacen("\"b\"", "\"x\"", 1), text.replacen("\"id\":\"b\",", "\n", 1)] {
        fs::write(&path, &damaged).unwrap();
        let error = Journal::open(&path).unwrap_err();
        assert!(matches!(error, Error::DocumentsLine { line: 3, .. }), "{error}");
        let words = error.to_string();
        assert!(words.contains("documents.jsonl, line 3") && words.contains("remove the line"), "{words}");
        assert_eq!(fs::read_to_string(&path).unwrap(), damaged, "nothing is lost by the attempt");
    }
    // What the message says helps.
    let without: Vec<&str> = text.lines().filter(|line| !line.contains("\"b\"")).collect();
    fs::write(&path, without.join("\n") + "\n").unwrap();
    assert_eq!(ids(&mut open(&path)), ["a", "c"]);
}

#[test]
fn files_of_another_version_or_kind_are_left_alone() {
    let (folder, path) = place();
    for (text, words) in [
        ("{\"format\":\"kvc documents\",\"version\":2}\nsomething\n", "version 2"),
        ("{\"id\": \"a\"}\n", "not a file of registered documents"),
        ("key tenant", "not a file of registered documents"),
    ] {
        fs::write(&path, text).unwrap();
        let error = Journal::open(&path).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("documents.jsonl"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "there is no lock beside it");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let others = fs::Permissions::from_mode(0o644);
            assert_ne!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            fs::set_permissions(&path, others).unwrap();
        }
    }
    assert!(matches!(Journal::open(folder.path()), Err(Error::NoDocuments { .. })));
    assert!(matches!(Journal::open(&folder.path().join("none/file")), Err(Error::Documents { .. })));
    // Somebody may have made the file before.
    fs::write(&path, "").unwrap();
    open(&path).append(&registered("a", "one")).unwrap();
    assert_eq!(ids(&mut open(&path)), ["a"]);
}

#[test]
fn one_journal_uses_a_file_also_after_it_was_replaced() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    for _ in 0..2 {
        assert!(matches!(Journal::open(&path), Err(Error::DocumentsInUse { .. })));
        journal.compact().unwrap();
    }
    drop(journal);
    open(&path);
}

#[test]
fn a_change_that_cannot_be_written_leaves_nothing() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    journal.append(&registered("a", "one")).unwrap();
    // Writes and the cut after them fail.
    let real = std::mem::replace(&mut journal.file, JournalFile::read_only(&path));
    journal.append(&registered("b", "two")).unwrap_err();
    assert!(journal.has_rest);
    journal.append(&registered("c", "three")).unwrap_err();
    // A write that fails in its middle leaves a part of a line.
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"check\":\"12").unwrap();
    journal.file = real;
    journal.left = journal.file.identity().unwrap();
    journal.append(&registered("d", "four")).unwrap();
    assert_eq!(ids(&mut journal), ["a", "d"]);
    drop(journal);
    assert_eq!(ids(&mut open(&path)), ["a", "d"]);
}

#[test]
fn a_large_file_is_written_again_once_half_of_it_is_not_needed() {
    let (folder, path) = place();
    let mut journal = open(&path);
    let text = "word ".repeat(2000);
    let size = || fs::metadata(&path).unwrap().len();
    let (mut largest, mut smaller) = (0, 0);
    for round in 0..1000 {
        let before = size();
        journal.append(&registered(&format!("{}", round % 10), &format!("{round} {text}"))).unwrap();
        journal.compact_if_due();
        largest = largest.max(size());
        smaller += u64::from(size() < before);
    }
    assert!((SMALL - 20_000..SMALL).contains(&largest), "{largest}");
    assert!((5..20).contains(&smaller), "10 MB were written, and each time 1 MiB is full: {smaller}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the journal and its lock");
    let texts: Vec<String> = documents(&mut journal).into_iter().map(|(_, text)| text).collect();
    let expected: Vec<String> = (990..1000).map(|round| format!("{round} {text}")).collect();
    assert_eq!(texts, expected);
    drop(journal);
    assert_eq!(documents(&mut open(&path)).len(), 10);
    // A file without dead lines stays as it is, whatever its size.
    let mut journal = open(&path);
    for id in 0..200 {
        journal.append(&registered(&format!("{id}"), &text)).unwrap();
        journal.compact_if_due();
    }
    assert!(size() > 2 * SMALL - 200_000, "{}", size());
    // Expired ones are dead as well.
    let file = size();
    for id in 0..300 {
        let Change::Registered(document) = registered(&format!("{id}"), &text) else { panic!() };
        journal.append(&Change::Registered(Registration { expires: Some(5), ..document })).unwrap();
    }
    journal.expire(5);
    journal.compact_if_due();
    assert!(size() < file / 2, "{}", size());
}

#[test]
fn a_folder_that_takes_no_new_file_delays_only_the_replacement() {
    let (_folder, path) = place();
    let mut journal = open(&path);
    journal.append(&registered("a", "one")).unwrap();
    journal.append(&registered("a", "two")).unwrap();
    // A folder of this name cannot be replaced by a file.
    fs::create_dir(beside(&path, "new")).unwrap();
    drop(journal);
    let mut journal = open(&path);
    assert_eq!(documents(&mut journal), [("a".to_owned(), "two".to_owned())]);
    journal.append(&registered("b", "three")).unwrap();
    drop(journal);
    fs::remove_dir(beside(&path, "new")).unwrap();
    let mut journal = open(&path);
    assert_eq!(ids(&mut journal), ["a", "b"]);
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 3);
}

#[test]
#[cfg(unix)]
fn only_the_owner_reads_the_files_and_a_link_stays_a_link() {
    use std::os::unix::fs::PermissionsExt as _;
    let (folder, path) = place();
    let link = folder.path().join("link");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let mut journal = open(&link);
    journal.append(&registered("a", "one")).unwrap();
    journal.compact().unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    drop(journal);
    // A link to a file that is not there yet makes this file, also over other links.
    let far = folder.path().join("far");
    fs::create_dir(&far).unwrap();
    let links = [folder.path().join("first"), folder.path().join("second")];
    std::os::unix::fs::symlink("second", &links[0]).unwrap();
    std::os::unix::fs::symlink("far/documents.jsonl", &links[1]).unwrap();
    for expected in [&["a"][..], &["a", "b"]] {
        let mut journal = open(&links[0]);
        journal.append(&registered(expected[expected.len() - 1], "one")).unwrap();
        drop(journal);
        assert_eq!(ids(&mut open(&links[0])), expected);
    }
    assert!(links.iter().all(|link| fs::symlink_metadata(link).unwrap().is_symlink()));
    assert_eq!(fs::read_dir(&far).unwrap().count(), 2, "the journal and its lock");
    let path = far.join("documents.jsonl");
    for file in [&path, &beside(&path, "lock")] {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600, "{}", file.display());
    }
}

#[test]
#[allow(clippy::used_underscore_binding, reason = "the field is there for what its drop does")]
fn a_journal_is_unlocked_although_a_child_process_still_holds_the_descriptor() {
    let (_folder, path) = place();
    let journal = open(&path);
    // A child has such a copy between its fork and the start of its program.
    let copy = journal._lock.0.try_clone().unwrap();
    assert!(matches!(Journal::open(&path), Err(Error::DocumentsInUse { .. })));
    drop(journal);
    drop(open(&path));
    drop(copy);
}
