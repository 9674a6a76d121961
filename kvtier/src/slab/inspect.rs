//! Describes the contents of a slab without changing them.

use std::collections::BTreeMap;
use std::path::Path;

use kvcore::{BlockKey, PolicyKind};
use serde::Serialize;

use super::open;
use super::state::SlabState;
use super::table::Listed;
use super::write::spans;
use super::{Slab, geometry::Geometry};
use crate::error::{Error, Result};
use crate::io::{Direction, DiskIo, IoRequest, PAGE, Pages, ReadOnly, run};
use crate::record::{AccountId, Header};

/// The contents of a slab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Inspection {
    /// The size of the file in bytes, which is its limit.
    pub limit_bytes: u64,
    /// The number of bytes in cells that contain records.
    pub bytes: u64,
    /// The number of bytes per cell.
    pub cell_bytes: usize,
    /// The number of records.
    pub records: usize,
    /// The number of records whose bytes have changed, if they were checked.
    pub damaged: Option<usize>,
    /// The records by model, tokenizer and format, those with the most bytes first.
    pub scopes: Vec<InspectedScope>,
}

/// The records of one model, tokenizer and format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InspectedScope {
    /// The start of the key that all keys of the model derive from.
    pub scope: String,
    /// The layout of the newest record that could be read.
    pub label: Option<String>,
    /// The number of records.
    pub records: usize,
    /// The number of these that follow another one, such as the blocks of a prompt.
    pub chained: usize,
    /// The number of payload bytes.
    pub bytes: u64,
    /// The times of the oldest and the newest write, in seconds since 1970.
    pub created: [u64; 2],
    /// The time that computing all of them took, in milliseconds, as far as it is known.
    pub cost_ms: u64,
    /// The records by tenant, those with the most bytes first.
    pub accounts: Vec<InspectedAccount>,
}

/// The records of one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InspectedAccount {
    /// The tenant's [account](crate::AccountId) in hexadecimal digits, or `None` for the default tenant.
    pub account: Option<String>,
    /// The number of records.
    pub records: usize,
    /// The number of payload bytes.
    pub bytes: u64,
}

impl Slab {
    /// Describes the slab in `folder`, which another process may be using. If `check` is true, reads every
    /// record and checks its digest. `progress` gets the number of records that have been read and their total.
    ///
    /// # Errors
    /// - Returns [`Error::NoSlab`] if there is no slab of this version.
    /// - Returns [`Error::File`] if the file cannot be read.
    pub fn inspect(folder: &Path, check: bool, progress: &mut dyn FnMut(usize, usize)) -> Result<Inspection> {
        let path = folder.join(Self::FILE);
        if !path.is_file() {
            return Err(Error::NoSlab { path: folder.to_owned() });
        }
        let io = ReadOnly::open(&path).map_err(Error::at("cannot open", &path))?;
        let geometry = open::geometry(&io).map_err(Error::at("cannot read", &path))?;
        let geometry = geometry.ok_or_else(|| Error::NoSlab { path: folder.to_owned() })?;
        let state = open::restore(&io, geometry, SlabState::new(geometry, PolicyKind::Lru, None))
            .map_err(Error::at("cannot read", &path))?;
        let (records, cells) = state.used();
        let mut scopes: BTreeMap<BlockKey, InspectedScope> = BTreeMap::new();
        let mut accounts: BTreeMap<(BlockKey, AccountId), (usize, u64)> = BTreeMap::new();
        let mut damaged = 0;
        for (done, listed) in state.listed().enumerate() {
            let of_scope = scopes.entry(listed.scope).or_insert_with(|| InspectedScope {
                scope: hex(&listed.scope),
                label: None,
                records: 0,
                chained: 0,
                bytes: 0,
                created: [u64::MAX, 0],
                cost_ms: 0,
                accounts: Vec::new(),
            });
            of_scope.records += 1;
            of_scope.chained += usize::from(listed.note.parent.is_some());
            of_scope.bytes += listed.payload as u64;
            let [oldest, newest] = of_scope.created;
            of_scope.created = [oldest.min(listed.created), newest.max(listed.created)];
            of_scope.cost_ms += listed.note.cost.as_millis() as u64;
            let of_account = accounts.entry((listed.scope, listed.note.account)).or_default();
            *of_account = (of_account.0 + 1, of_account.1 + listed.payload as u64);
            if check || of_scope.label.is_none() {
                match label(&io, geometry, &listed) {
                    Some(label) => of_scope.label = Some(label),
                    None => damaged += 1,
                }
            }
            progress(done + 1, records);
        }
        for ((scope, account), (records, bytes)) in accounts {
            let account = (account != AccountId::DEFAULT).then(|| account.to_string());
            let of_account = InspectedAccount { account, records, bytes };
            scopes.entry(scope).and_modify(|of_scope| of_scope.accounts.push(of_account));
        }
        let mut scopes: Vec<_> = scopes.into_values().collect();
        for scope in &mut scopes {
            scope.accounts.sort_by_key(|account| std::cmp::Reverse(account.bytes));
        }
        scopes.sort_by_key(|scope| std::cmp::Reverse(scope.bytes));
        Ok(Inspection {
            limit_bytes: geometry.file_bytes(),
            bytes: u64::from(cells) * geometry.cell_bytes() as u64,
            cell_bytes: geometry.cell_bytes(),
            records,
            damaged: check.then_some(damaged),
            scopes,
        })
    }
}

/// Reads a record, and returns its label if it is undamaged.
fn label(io: &dyn DiskIo, geometry: Geometry, listed: &Listed) -> Option<String> {
    let header = (geometry.cell_offset(listed.runs.first()?.start), 1);
    let spans =
        std::iter::once(header).chain(spans(geometry, &listed.runs, [listed.payload.div_ceil(PAGE)], 0));
    let request =
        |(offset, count)| IoRequest { direction: Direction::Read, offset, pages: Pages::new(count) };
    let pages = run(io, spans.map(request).collect(), None).ok()?;
    let (head, rest) = pages.split_first()?;
    let header = Header::read(&head.bytes()[..PAGE])?;
    let same = (header.key, header.sequence) == (listed.key, listed.sequence)
        && header.payload_len() == Some(listed.payload);
    if same { header.read_label(rest.iter().map(Pages::bytes)) } else { None }
}

/// Returns the first bytes of a key in hexadecimal digits.
fn hex(key: &BlockKey) -> String {
    let bytes = key.as_bytes();
    let start = bytes[..6].iter().fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
    format!("{start:012x}")
}
