//! Records in memory of the slab, which the disk reads and writes without a copy, beside records in vectors.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::disk::{Dice, Event, TestDisk};
use common::{in_slab_memory, load, record, scope, ways};
use kvtier::io::{Direction, PAGE};
use kvtier::{Missed, Record, RecordId, Slab, SlabConfig, Stored};

const PATIENCE: Duration = Duration::from_secs(20);

/// The lengths of buffers that fill pages, and of some that do not.
const LENS: [usize; 8] =
    [PAGE, 16 * PAGE, 17 * PAGE, 130 * PAGE, 300 * PAGE, 0, 16 * PAGE - 1, 128 * PAGE + 100];

/// A record of one to four buffers with up to 3,000 tokens.
fn any_record(number: u32, dice: &mut Dice) -> Record {
    let tokens: Vec<u32> = (0..=dice.roll(3000) as u32).map(|token| token ^ number).collect();
    let id = RecordId {
        key: scope().child(&[number]),
        tokens: tokens.into(),
        stored_start: i64::from(number),
        label: format!("format {}", dice.roll(1000)).into(),
    };
    // Half of the records only have buffers that fill pages.
    let sides = if dice.roll(2) == 0 { 5 } else { LENS.len() as u64 };
    let mut buffer =
        |_| (0..LENS[dice.roll(sides) as usize]).map(|_| dice.roll(256) as u8).collect::<Vec<u8>>();
    let count = 1 + number as usize % 4;
    Record::new(id, (0..count).map(&mut buffer).collect())
}

#[test]
fn records_of_any_lengths_in_any_memory_come_back_from_scattered_cells() {
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        let config =
            SlabConfig { limit: 24 << 20, cell_bytes: 3 * PAGE, io: Some(way), ..SlabConfig::default() };
        let mut slab = Slab::open(folder.path(), scope(), config).unwrap();
        let mut dice = Dice(0x1234_5678_9abc_def1);
        let (mut kept, mut found, mut evicted): (Vec<Record>, usize, u64) = (Vec::new(), 0, 0);
        for number in 0..120 {
            let one = any_record(number, &mut dice);
            let mut stored = if dice.roll(4) > 0 { in_slab_memory(&slab, &one) } else { one.clone() };
            if dice.roll(4) == 0 {
                // One buffer lies elsewhere.
                let last = stored.buffers.len() - 1;
                stored.buffers[last] = stored.buffers[last].to_vec().into();
            }
            assert_eq!(stored, one);
            assert_eq!(slab.store(stored), Stored::Queued, "{number}");
            kept.push(one);
            if number % 10 == 9 {
                assert!(slab.flush(PATIENCE));
                slab.check_invariants().unwrap();
                evicted = evicted.max(slab.usage().evicted);
                for one in &kept {
                    if let Ok(buffers) = load(&slab, &one.id) {
                        assert_eq!(buffers, one.buffers, "{way}");
                        slab.recycle(buffers);
                        found += 1;
                    }
                }
            }
            if number % 40 == 39 {
                drop(slab);
                slab = Slab::open(folder.path(), scope(), config).unwrap();
            }
        }
        assert!(found > 200 && evicted > 0 && slab.usage().damaged == 0, "{found} {evicted}");
    }
}

#[test]
fn a_changed_byte_anywhere_in_the_pages_is_damage() {
    let disk = TestDisk::in_memory(Vec::new());
    let one = record(1, 20 * PAGE);
    let slab = disk.open().unwrap();
    assert_eq!(slab.store(in_slab_memory(&slab, &one)), Stored::Queued);
    drop(slab);
    let image = disk.image();
    let body = one.buffers.iter().flat_map(|buffer| buffer.to_vec()).collect::<Vec<u8>>();
    let start = image.windows(64).position(|bytes| *bytes == body[..64]).unwrap();
    assert_eq!((start % PAGE, &image[start..start + body.len()]), (0, &body[..]), "buffers fill their pages");
    let behind = start + body.len() + 4;
    for at in (start..start + body.len()).step_by(999).chain([start + body.len() - 1, behind]) {
        let mut image = image.clone();
        image[at] ^= 16;
        let slab = TestDisk::in_memory(image).open().unwrap();
        let missed = load(&slab, &one.id);
        assert!(matches!(missed, Err(Missed::Damaged)), "byte {at}: {missed:?}");
        assert_eq!(slab.usage().damaged, 1);
    }
}

#[test]
fn another_record_under_the_same_key_is_never_taken_for_this_one() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let one = record(1, 20 * PAGE);
    assert_eq!(slab.store(in_slab_memory(&slab, &one)), Stored::Queued);
    assert!(slab.flush(PATIENCE));
    let others: [fn(&mut RecordId); 5] = [
        |id| id.tokens = [9; 17].into(),
        // As many more bytes as a page has.
        |id| id.tokens = [9; 17 + PAGE / 4].into(),
        |id| id.tokens = [].into(),
        |id| id.label = "another one, which is longer".into(),
        |id| id.stored_start += 1,
    ];
    for change in others {
        let mut id = one.id.clone();
        change(&mut id);
        let missed = load(&slab, &id);
        assert!(matches!(missed, Err(Missed::Differs)), "{id:?}: {missed:?}");
        // What is asked for again under another identity may be stored again.
        assert_eq!(load(&slab, &one.id).unwrap(), one.buffers);
    }
    assert_eq!(slab.usage().damaged, 0);
}

/// Returns whether the header of a record was written.
fn has_header(disk: &TestDisk, one: &Record) -> bool {
    let key = one.id.key.as_bytes();
    disk.state().events.iter().any(|event| {
        let Event::Write { bytes, .. } = event else { return false };
        bytes.starts_with(b"KVRECORD") && bytes.windows(key.len()).any(|part| part == key)
    })
}

/// The number of bytes in the request with the payload of a record whose buffers have 20 pages: the label and the tokens
/// have a page behind them.
const PAYLOAD: usize = 21 * PAGE;

#[test]
fn a_payload_is_one_request_with_the_page_behind_the_buffers() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let mut one = record(1, 20 * PAGE);
    // The first tokens fit into a page with the label, the others do not. The pages with the tokens are a request then.
    for (tokens, expected) in [(1000, vec![PAYLOAD, PAGE]), (1050, vec![20 * PAGE, 2 * PAGE, PAGE])] {
        one.id.tokens = (0..tokens).collect();
        disk.state().events.clear();
        assert_eq!(slab.store(in_slab_memory(&slab, &one)), Stored::Queued);
        assert!(slab.flush(PATIENCE));
        let written = |event: &Event| match event {
            Event::Write { bytes, .. } => Some(bytes.len()),
            _ => None,
        };
        let lens: Vec<usize> = disk.state().events.iter().filter_map(written).collect();
        // A checkpoint can come first.
        assert!(lens.ends_with(&expected) && lens.len() <= expected.len() + 1, "{tokens} tokens: {lens:?}");
        assert_eq!(load(&slab, &one.id).unwrap(), one.buffers);
    }
}

#[test]
fn a_header_waits_for_the_payload_of_its_own_record() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let (held, other) = (record(1, 20 * PAGE), record(2, 30 * PAGE));
    disk.state().holding = Some(PAYLOAD);
    for one in [&held, &other] {
        assert_eq!(slab.store(in_slab_memory(&slab, one)), Stored::Queued);
    }
    let deadline = Instant::now() + PATIENCE;
    while disk.held() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(30));
    assert!(disk.held() == 1 && !has_header(&disk, &held));
    disk.release();
    assert!(slab.flush(PATIENCE) && [&held, &other].iter().all(|one| has_header(&disk, one)));
    assert_eq!(load(&slab, &held.id).unwrap(), held.buffers);
}

#[test]
fn a_payload_that_fails_gets_no_header() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let (failing, other) = (record(1, 20 * PAGE), record(2, 30 * PAGE));
    disk.state().failing_length = Some(PAYLOAD);
    for one in [&failing, &other] {
        assert_eq!(slab.store(in_slab_memory(&slab, one)), Stored::Queued);
    }
    assert!(slab.flush(PATIENCE));
    assert!(!has_header(&disk, &failing) && !slab.contains(&failing.id.key));
    let usage = slab.usage();
    assert_eq!((usage.write_errors, usage.damaged), (1, 0));
    disk.state().failing_length = None;
    assert_eq!(slab.store(in_slab_memory(&slab, &failing)), Stored::Queued);
    assert!(slab.flush(PATIENCE));
    assert_eq!(load(&slab, &failing.id).unwrap(), failing.buffers);
    slab.check_invariants().unwrap();
}

#[test]
fn buffers_that_only_fill_pages_together_are_copied() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let one = record(1, 33 * PAGE);
    assert!(one.buffers.iter().all(|buffer| !buffer.len().is_multiple_of(PAGE)));
    assert_eq!(slab.store(in_slab_memory(&slab, &one)), Stored::Queued);
    assert!(slab.flush(PATIENCE));
    for _ in 0..3 {
        let found = load(&slab, &one.id).unwrap();
        assert_eq!(found, one.buffers);
        slab.recycle(found);
    }
}

#[test]
fn memory_comes_back_only_when_the_disk_has_answered() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let (one, two) = (record(1, 20 * PAGE), record(2, 20 * PAGE));
    assert_eq!(slab.store(in_slab_memory(&slab, &one)), Stored::Queued);
    assert!(slab.flush(PATIENCE));
    disk.hang();
    let since = Instant::now();
    let late = slab.load(&one.id, since + Duration::from_millis(30));
    assert!(matches!(late, Err(Missed::Late)), "{late:?}");
    // The memory of the load belongs to the disk. This record gets other memory.
    let next = in_slab_memory(&slab, &two);
    disk.go_on();
    assert_eq!(next, two, "the disk has written elsewhere");
    assert_eq!(load(&slab, &one.id).unwrap(), one.buffers);
}

#[test]
fn a_disk_that_fails_or_reads_short_gives_no_buffers() {
    let disk = TestDisk::in_memory(Vec::new());
    let slab = disk.open().unwrap();
    let numbers = [1, 2, 3].map(|number| record(number, 20 * PAGE));
    for one in &numbers[..2] {
        assert_eq!(slab.store(in_slab_memory(&slab, one)), Stored::Queued);
    }
    assert!(slab.flush(PATIENCE));
    disk.state().short = Some(Direction::Read);
    let short = load(&slab, &numbers[0].id);
    assert!(matches!(short, Err(Missed::Failed(_))), "{short:?}");
    disk.state().short = None;
    disk.state().failing = Some(Direction::Write);
    assert_eq!(slab.store(in_slab_memory(&slab, &numbers[2])), Stored::Queued);
    assert!(slab.flush(PATIENCE) && !slab.contains(&numbers[2].id.key));
    disk.state().failing = None;
    assert_eq!(slab.usage().write_errors, 1);
    assert_eq!(load(&slab, &numbers[1].id).unwrap(), numbers[1].buffers);
    slab.check_invariants().unwrap();
}
