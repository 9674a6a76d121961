//! `kvc doctor FOLDER`: how a folder's disk is read and written, and how fast.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use kvcore::KeyScope;
use kvtier::{Record, RecordId, Slab, SlabConfig};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::error::{Error, Result};
use crate::report::{json, table};

/// The number of records that are written and read.
const RECORDS: u32 = 32;

/// The number of bytes per record.
const RECORD: usize = 2 << 20;

/// The longest time in which all records must be written.
const PATIENCE: Duration = Duration::from_secs(120);

/// The findings about a disk.
#[derive(Serialize)]
struct DiskReport {
    /// The way of I/O that is used.
    way: String,
    /// The ways that would be preferred, each with the reason why it cannot be used.
    refused: Vec<(String, String)>,
    /// The bytes per second when records are written, and when they are read.
    write: f64,
    read: f64,
}

pub(super) fn doctor(args: &DoctorArgs) -> Result<()> {
    if !args.folder.is_dir() {
        return Err(kvtier::Error::NotAFolder { path: args.folder.clone() }.into());
    }
    let folder = args.folder.join(format!(".kvc-doctor-{}", std::process::id()));
    let examined = examine(&folder);
    // What could not be removed stays, and changes nothing.
    drop(std::fs::remove_dir_all(&folder));
    let DiskReport { way, refused, write, read } = &examined?;
    let mut out = std::io::stdout().lock();
    if args.json {
        return json(
            &mut out,
            &DiskReport { way: way.clone(), refused: refused.clone(), write: *write, read: *read },
        );
    }
    let mut table = table(&["disk", ""]);
    table.add_row(["folder", &args.folder.display().to_string()]);
    table.add_row(["way of I/O", way]);
    for (way, reason) in refused {
        table.add_row([&format!("not {way}"), reason]);
    }
    table.add_row(["writes", &format!("{:.0} MB/s, in records of 2 MiB", write / 1e6)]);
    table.add_row(["reads", &format!("{:.0} MB/s, in records of 2 MiB", read / 1e6)]);
    writeln!(out, "{table}\n\nFor processors and devices, see kvc devices.")?;
    Ok(())
}

/// Writes and reads records in a folder.
fn examine(folder: &Path) -> Result<DiskReport> {
    let scope = KeyScope::new("kvc doctor", b"").root();
    let limit = 3 * u64::from(RECORDS) * RECORD as u64 / 2;
    let slab = Slab::open(folder, scope, SlabConfig { limit, ..SlabConfig::default() })?;
    let id = |number: u32| RecordId {
        key: scope.child(&[number]),
        tokens: [number].into(),
        stored_start: 0,
        label: "kvc doctor".into(),
    };
    let record = |number: u32| {
        let mut buffers = slab.buffers(&[RECORD]);
        for buffer in &mut buffers {
            buffer.fill(number as u8);
        }
        Record::new(id(number), buffers)
    };
    let records: Vec<_> = (0..RECORDS).map(record).collect();
    let bytes = f64::from(RECORDS) * RECORD as f64;
    let begun = Instant::now();
    for record in records {
        slab.store(record);
    }
    if !slab.flush(PATIENCE) {
        return Err(Error::SlowDisk(folder.to_owned()));
    }
    let write = bytes / begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let loads: Vec<_> = (0..RECORDS).map(|number| slab.begin_load(&id(number))).collect();
    let mut found = 0_u32;
    for loading in loads {
        loading.wait_until(begun + PATIENCE);
        if let Ok(buffers) = loading.end() {
            slab.recycle(buffers);
            found += 1;
        }
    }
    let read = f64::from(found) * RECORD as f64 / begun.elapsed().as_secs_f64();
    let choice = slab.io_choice();
    let refused =
        choice.map(|choice| choice.refused.iter().map(|(way, why)| (way.to_string(), why.clone())).collect());
    Ok(DiskReport {
        way: choice.map_or_else(String::new, |choice| choice.way.to_string()),
        refused: refused.unwrap_or_default(),
        write,
        read,
    })
}
