//! The places of the tables and cells in a slab's file.
//!
//! ```text
//!   page 0          the superblock: version, sizes, checksum
//!   table A, B      the two newest checkpoints, written in turn
//!   cell 0, 1, …    the records
//! ```

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};
use crate::io::PAGE;
use crate::record::CellRun;

/// The first bytes of the file.
const MAGIC: [u8; 8] = *b"KVSLAB\0\0";

/// The version of the superblock and of the tables.
const VERSION: u32 = 4;

/// The number of bytes that a table reserves for each cell: more than an entry for one cell and a scope of its own.
const TABLE_BYTES_PER_CELL: u64 = 184;

/// A slab may grow to this multiple of its first size before its tables are too small.
const GROWTH: u64 = 4;

/// The smallest number of cells of a slab.
const FEWEST_CELLS: u64 = 4;

/// The sizes of a slab's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) cell_pages: u32,
    pub(super) table_pages: u32,
    pub(super) cells: u32,
}

impl Geometry {
    /// Returns the geometry of a file of at most `limit` bytes, with cells of `cell_bytes` rounded up to whole
    /// pages.
    pub(super) fn within(limit: u64, cell_bytes: usize) -> Result<Self> {
        let cell_pages = cell_bytes.div_ceil(PAGE).max(2) as u32;
        let page = PAGE as u64;
        let per_cell = u64::from(cell_pages) * page;
        // Two tables, each with room for the cells of a slab that has grown. Rounding up the tables takes
        // less than a page each.
        let cost = per_cell + 2 * GROWTH * TABLE_BYTES_PER_CELL;
        let fixed = 5 * page;
        let cells = (limit.saturating_sub(fixed) / cost).min(u64::from(u32::MAX) / GROWTH);
        if cells < FEWEST_CELLS {
            return Err(Error::LimitTooSmall { limit, least: fixed + FEWEST_CELLS * cost });
        }
        let table_pages = (1 + (cells * GROWTH * TABLE_BYTES_PER_CELL).div_ceil(page)) as u32;
        Ok(Self { cell_pages, table_pages, cells: cells as u32 })
    }

    /// Returns this geometry with as many cells as `limit` bytes and the tables allow, or `None` if that is
    /// fewer than now.
    pub(super) fn grown(self, limit: u64) -> Option<Self> {
        let page = PAGE as u64;
        let in_tables = (u64::from(self.table_pages) - 1) * page / TABLE_BYTES_PER_CELL;
        let in_file = limit.saturating_sub(self.cell_offset(0)) / self.cell_bytes() as u64;
        let cells = in_tables.min(in_file).min(u64::from(u32::MAX)) as u32;
        (cells >= self.cells).then_some(Self { cells, ..self })
    }

    /// Returns the number of bytes per cell.
    pub(super) fn cell_bytes(self) -> usize {
        self.cell_pages as usize * PAGE
    }

    /// Returns the offset of a cell in the file.
    pub(super) fn cell_offset(self, cell: u32) -> u64 {
        let tables = 1 + 2 * u64::from(self.table_pages);
        (tables + u64::from(cell) * u64::from(self.cell_pages)) * PAGE as u64
    }

    /// Returns the offset of a table in the file, of the two.
    pub(super) fn table_offset(self, table: u64) -> u64 {
        (1 + (table % 2) * u64::from(self.table_pages)) * PAGE as u64
    }

    /// Returns the number of bytes in the file.
    pub(super) fn file_bytes(self) -> u64 {
        self.cell_offset(self.cells)
    }

    /// Returns the number of cells that a record with `payload` bytes needs, with its header.
    pub(super) fn cells_for(self, payload: usize) -> u32 {
        payload.saturating_add(PAGE).div_ceil(self.cell_bytes()).min(u32::MAX as usize) as u32
    }

    /// Returns whether all cells of a run exist.
    pub(super) fn has(self, run: CellRun) -> bool {
        run.count > 0 && run.start.checked_add(run.count).is_some_and(|end| end <= self.cells)
    }

    /// Writes the superblock to a page.
    pub(super) fn write(self, page: &mut [u8]) {
        page.fill(0);
        page[..8].copy_from_slice(&MAGIC);
        for (at, word) in [VERSION, self.cell_pages, self.table_pages, self.cells].into_iter().enumerate() {
            page[8 + 4 * at..][..4].copy_from_slice(&word.to_le_bytes());
        }
        let checksum = xxh3_64(&page[..PAGE - 8]);
        page[PAGE - 8..].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Reads a superblock, or returns `None` if the page is of another version or damaged.
    pub(super) fn read(page: &[u8]) -> Option<Self> {
        let (body, checksum) = page.get(..PAGE)?.split_at(PAGE - 8);
        let intact = body[..8] == MAGIC && checksum == xxh3_64(body).to_le_bytes();
        let word = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&body[8 + 4 * at..][..4]);
            u32::from_le_bytes(bytes)
        };
        let [version, cell_pages, table_pages, cells] = [0, 1, 2, 3].map(word);
        let valid = version == VERSION && cell_pages >= 2 && table_pages >= 2;
        (intact && valid).then_some(Self { cell_pages, table_pages, cells })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_stays_within_its_limit_and_uses_most_of_it() {
        for limit in [1 << 20, 10 << 20, (1 << 30) + 12345, 50 << 30] {
            let geometry = Geometry::within(limit, 64 << 10).unwrap();
            assert!(geometry.file_bytes() <= limit, "{limit}: {geometry:?}");
            assert!(geometry.file_bytes() as f64 > 0.8 * limit as f64, "{limit}: {geometry:?}");
            assert!(geometry.grown(limit).is_some_and(|grown| grown.cells >= geometry.cells));
        }
        let refused = Geometry::within(1000, 64 << 10).unwrap_err();
        let Error::LimitTooSmall { least, .. } = refused else { panic!("{refused}") };
        assert!(Geometry::within(least, 64 << 10).is_ok() && Geometry::within(least - 1, 64 << 10).is_err());
    }

    #[test]
    fn a_slab_grows_and_does_not_shrink() {
        let small = Geometry::within(10 << 20, 64 << 10).unwrap();
        let large = small.grown(30 << 20).unwrap();
        assert!(large.cells > 2 * small.cells && large.file_bytes() <= 30 << 20);
        assert_eq!((large.table_pages, large.cell_offset(0)), (small.table_pages, small.cell_offset(0)));
        assert_eq!(small.grown(9 << 20), None);
        assert!(small.grown(1 << 30).unwrap().cells <= 5 * small.cells, "the tables are too small for more");
    }

    #[test]
    fn a_superblock_is_read_back_unless_a_bit_changed() {
        let geometry = Geometry::within(10 << 20, 64 << 10).unwrap();
        let mut page = vec![0; PAGE];
        geometry.write(&mut page);
        assert_eq!(Geometry::read(&page), Some(geometry));
        for byte in 0..PAGE {
            page[byte] ^= 4;
            assert_eq!(Geometry::read(&page), None, "byte {byte}");
            page[byte] ^= 4;
        }
    }
}
