//! Checkpoints: a slab's records and open cells, as one table that is written as a whole.

use std::num::NonZeroU64;

use kvcore::BlockKey;
use xxhash_rust::xxh3::xxh3_64;

use crate::io::{PAGE, Pages};
use crate::record::{CellRun, RecordNote};

/// The first bytes of a table.
const MAGIC: [u8; 8] = *b"KVTABLE3";

/// A record as a checkpoint lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) key: BlockKey,
    pub(super) scope: BlockKey,
    pub(super) sequence: u64,
    pub(super) payload: usize,
    pub(super) note: RecordNote,
    /// The time of the write, in seconds since 1970.
    pub(super) created: u64,
    /// The digest of the record's identity.
    pub(super) identity: u64,
    /// How often the record was used, as far as eviction policies count.
    pub(super) uses: u8,
    pub(super) runs: Vec<CellRun>,
}

/// The contents of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Table {
    /// The number of this checkpoint.
    pub(super) generation: u64,
    /// The number of the last write that this checkpoint may list.
    pub(super) sequence: u64,
    /// The cells that may be written before the next checkpoint.
    pub(super) open: Vec<CellRun>,
    /// The records, the least recently used first.
    pub(super) records: Vec<Listed>,
}

impl Table {
    /// Returns the table as whole pages.
    pub(super) fn pages(&self) -> Pages {
        let mut scopes: Vec<BlockKey> = self.records.iter().map(|record| record.scope).collect();
        scopes.sort_unstable();
        scopes.dedup();
        let mut body = Vec::new();
        let word = |body: &mut Vec<u8>, word: u64| body.extend_from_slice(&word.to_le_bytes());
        let runs = |body: &mut Vec<u8>, runs: &[CellRun]| {
            body.extend_from_slice(&(runs.len() as u32).to_le_bytes());
            for run in runs {
                body.extend_from_slice(&run.start.to_le_bytes());
                body.extend_from_slice(&run.count.to_le_bytes());
            }
        };
        word(&mut body, scopes.len() as u64);
        for scope in &scopes {
            body.extend_from_slice(scope.as_bytes());
        }
        runs(&mut body, &self.open);
        word(&mut body, self.records.len() as u64);
        for listed in &self.records {
            let Listed { key, scope, sequence, payload, note, created, identity, uses, runs: places } =
                listed;
            body.extend_from_slice(key.as_bytes());
            let scope = scopes.binary_search(scope).unwrap_or_default();
            body.extend_from_slice(&(scope as u32).to_le_bytes());
            word(&mut body, *sequence);
            word(&mut body, *payload as u64);
            body.extend_from_slice(&note.parent_bytes());
            word(&mut body, note.nanoseconds());
            word(&mut body, note.text.map_or(0, NonZeroU64::get));
            word(&mut body, *created);
            word(&mut body, *identity);
            word(&mut body, note.account.bits());
            body.push(*uses);
            runs(&mut body, places);
        }
        let mut pages = Pages::new(1 + body.len().div_ceil(PAGE));
        let (head, rest) = pages.bytes_mut().split_at_mut(PAGE);
        rest[..body.len()].copy_from_slice(&body);
        head[..8].copy_from_slice(&MAGIC);
        let fields = [self.generation, self.sequence, body.len() as u64, xxh3_64(&body)];
        for (at, field) in fields.into_iter().enumerate() {
            head[8 + 8 * at..][..8].copy_from_slice(&field.to_le_bytes());
        }
        let checksum = xxh3_64(&head[..PAGE - 8]);
        head[PAGE - 8..].copy_from_slice(&checksum.to_le_bytes());
        pages
    }

    /// Returns the number of bytes of a table that starts with this page, and the checkpoint's number. Returns
    /// `None` if the page does not start a table or is damaged.
    pub(super) fn head(page: &[u8]) -> Option<(usize, u64)> {
        let (body, checksum) = page.get(..PAGE)?.split_at(PAGE - 8);
        if body[..8] != MAGIC || checksum != xxh3_64(body).to_le_bytes() {
            return None;
        }
        let mut fields = Reader(&body[8..]);
        let (generation, _sequence, len) = (fields.word()?, fields.word()?, fields.word()?);
        Some((usize::try_from(len).ok()?.checked_add(PAGE)?, generation))
    }

    /// Reads a table, or returns `None` if it is damaged.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (len, generation) = Self::head(bytes.get(..PAGE)?)?;
        let mut fields = Reader(&bytes[16..]);
        let (sequence, _len, digest) = (fields.word()?, fields.word()?, fields.word()?);
        let body = bytes.get(PAGE..len)?;
        if xxh3_64(body) != digest {
            return None;
        }
        let mut body = Reader(body);
        let scopes = body.word()?;
        let scopes = (0..scopes).map(|_| body.key()).collect::<Option<Vec<_>>>()?;
        let open = body.runs()?;
        let records = body.word()?;
        let mut listed = || {
            let key = body.key()?;
            let scope = *scopes.get(body.half()? as usize)?;
            let (sequence, payload) = (body.word()?, body.word()? as usize);
            let (parent, cost, text) = (body.key()?, body.word()?, body.word()?);
            let (created, identity, account) = (body.word()?, body.word()?, body.word()?);
            let note = RecordNote::of_file(parent, cost, text, account);
            let (&[uses], runs) = (body.take(1)?, body.runs()?) else { return None };
            Some(Listed { key, scope, sequence, payload, note, created, identity, uses, runs })
        };
        let records = (0..records).map(|_| listed()).collect::<Option<Vec<_>>>()?;
        Some(Self { generation, sequence, open, records })
    }
}

/// Reads fields from the start of bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn word(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn half(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn key(&mut self) -> Option<BlockKey> {
        Some(BlockKey::from_bytes(self.take(32)?.try_into().ok()?))
    }

    fn runs(&mut self) -> Option<Vec<CellRun>> {
        let count = self.half()?;
        let run = |_| Some(CellRun { start: self.half()?, count: self.half()? });
        (0..count).map(run).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::record::AccountId;

    fn table() -> Table {
        let key = |byte| BlockKey::from_bytes([byte; 32]);
        let listed = |byte: u8| Listed {
            key: key(byte),
            scope: key(byte % 2),
            sequence: u64::from(byte) << 33,
            payload: 1000 + usize::from(byte),
            note: RecordNote {
                parent: (!byte.is_multiple_of(3)).then(|| key(byte)),
                cost: Duration::from_micros(u64::from(byte)),
                text: NonZeroU64::new(u64::from(byte % 4)),
                account: AccountId::from_bits(u64::from(byte % 5)),
            },
            created: u64::from(byte) << 22,
            identity: u64::from(byte) << 40,
            uses: byte % 16,
            runs: (0..u32::from(byte) % 3).map(|start| CellRun { start: 7 * start, count: 3 }).collect(),
        };
        let open = vec![CellRun { start: 100, count: 50 }, CellRun { start: 200, count: 1 }];
        Table { generation: 9, sequence: 77, open, records: (0..200).map(listed).collect() }
    }

    #[test]
    fn a_table_is_read_back() {
        for table in [Table::default(), table()] {
            let pages = table.pages();
            assert_eq!(Table::read(pages.bytes()).as_ref(), Some(&table));
            let (len, generation) = Table::head(&pages.bytes()[..PAGE]).unwrap();
            assert!(len <= pages.bytes().len() && generation == table.generation);
        }
    }

    #[test]
    fn a_damaged_or_torn_table_is_refused() {
        let mut pages = table().pages();
        let (len, _) = Table::head(pages.bytes()).unwrap();
        for byte in (0..len).step_by(61).chain([0, 8, PAGE - 1, len - 1]) {
            pages.bytes_mut()[byte] ^= 16;
            assert_eq!(Table::read(pages.bytes()), None, "byte {byte} of {len}");
            pages.bytes_mut()[byte] ^= 16;
        }
        for cut in [0, 100, PAGE, len - 1] {
            assert_eq!(Table::read(&pages.bytes()[..cut]), None, "{cut} of {len} bytes");
        }
    }
}
