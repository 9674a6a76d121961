//! The attention lists that a step's layers share, and the tensors in them.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{KeyForm, Rope};

use crate::operations::angles::SentAngles;
use crate::operations::geometry::{PlaneGeometry, RowNumbers};
use crate::operations::sent::SentTensor;
use crate::operators::Tensor;
use crate::queue::{ListMemory, Work};

/// Alignment in bytes of lists that are sent together.
const ALIGN: usize = 64;

/// Lists that are sent together, as bytes.
#[derive(Debug, Default)]
pub(super) struct PackedLists(pub(super) Vec<u8>);

impl PackedLists {
    /// Adds a list. Returns its offset in bytes.
    pub(super) fn add<T: bytemuck::NoUninit>(&mut self, list: &[T]) -> usize {
        let at = self.0.len().next_multiple_of(ALIGN);
        self.0.resize(at, 0);
        self.0.extend_from_slice(bytemuck::cast_slice(list));
        at
    }
}

/// The entries of an attention, for all layers whose pools have the same geometry.
#[derive(Debug)]
pub(crate) struct AttentionPlan {
    pub(super) entries: Vec<PlannedEntry>,
    pub(super) lists: Arc<ListMemory>,
}

/// A range of rows with the same segments.
#[derive(Debug)]
pub(super) struct PlannedEntry {
    pub(super) rows: Range<usize>,
    pub(super) runs: Vec<GroupTokens>,
}

/// The tokens of a merge group.
#[derive(Debug)]
pub(super) struct GroupTokens {
    pub(super) group: usize,
    pub(super) tokens: usize,
    /// Row indices of K and V.
    pub(super) places: [RowNumbers; 2],
    /// `[1, 1, tokens]`: the factor for each token's logits. None if all are 1.
    pub(super) factors: Option<Tensor>,
    /// `[1, rows, tokens]`: 0 where a row sees a token, and −∞ elsewhere. None if all rows see all tokens.
    pub(super) mask: Option<Tensor>,
    pub(super) rotation: Option<KeyRotation>,
}

/// The rotation that a run's keys get when they are read.
#[derive(Debug)]
pub(super) struct KeyRotation {
    /// The distinct angles, as positions.
    pub(super) distinct: Vec<i64>,
    /// The index of each token's angle.
    pub(super) which: Tensor,
}

/// The angles of a plan: for the queries of each entry, and for the keys of each run.
#[derive(Debug)]
pub(crate) struct PlanAngles {
    pub(super) queries: Vec<SentAngles>,
    pub(super) keys: Vec<Vec<Option<SentAngles>>>,
}

/// A step's sequences as block tables. None if the step's work does not fit that form.
#[derive(Debug)]
pub(crate) struct DecodeTables(pub(super) Option<SequenceTables>);

/// One block table per row.
#[derive(Debug)]
pub(super) struct SequenceTables {
    pub(super) table: SentTensor,
    /// Number of tokens per sequence.
    pub(super) lengths: Vec<i64>,
    /// Total number of blocks of all sequences.
    pub(super) blocks: usize,
    /// The positions to which queries are rotated.
    pub(super) positions: Vec<i64>,
}

/// The capacity for rows that are computed side by side: one set of operators handles any tokens that fit.
#[derive(Debug, Clone)]
pub(super) struct RowRoom {
    pub(super) keys: KeyForm,
    pub(super) rope: Option<Arc<Rope>>,
    pub(super) rows: usize,
    /// Number of tokens per row.
    pub(super) tokens: usize,
    /// Number of angles that keys are rotated by.
    pub(super) angles: usize,
    /// The geometry of K and of V.
    pub(super) geometry: [PlaneGeometry; 2],
    /// The factor on each merge group's log-sum-exp.
    pub(super) groups: Vec<f32>,
}

/// The lists of a [`RowRoom`] on the device.
#[derive(Debug)]
pub(crate) struct RoomLists {
    pub(super) room: RowRoom,
    /// Address of the first list.
    pub(super) at: u64,
    pub(super) layout: RoomLayout,
    /// The lists' memory; none if each replay of a graph provides the lists.
    pub(super) list: Option<Arc<ListMemory>>,
}

/// Offsets in bytes of the lists of a [`RowRoom`].
#[derive(Debug)]
pub(super) struct RoomLayout {
    pub(super) index: [(usize, Option<usize>); 2],
    pub(super) masks: Vec<usize>,
    pub(super) factors: usize,
    pub(super) which: usize,
    pub(super) key_angles: [usize; 2],
    pub(super) query_angles: [usize; 2],
    pub(super) chosen: usize,
    pub(super) places: usize,
}

impl AttentionPlan {
    /// Holds the lists until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        work.hold_list(&self.lists);
    }
}

impl PlanAngles {
    /// Holds the angles until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        let keys = self.keys.iter().flatten().flatten();
        self.queries.iter().chain(keys).for_each(|angles| angles.hold(work));
    }
}

impl DecodeTables {
    /// Holds the tables until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        if let Some(tables) = &self.0 {
            tables.table.hold(work);
        }
    }
}

impl RoomLists {
    /// Holds the lists until the work is done. Lists that replays provide need no hold, because the graph
    /// holds them.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        if let Some(list) = &self.list {
            work.hold_list(list);
        }
    }
}
