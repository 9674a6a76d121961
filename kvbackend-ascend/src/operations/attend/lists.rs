//! The attention lists that a step's layers share, and their tensors.

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

/// Several lists, packed as bytes so that one transfer sends them all.
#[derive(Debug, Default)]
pub(super) struct PackedLists(pub(super) Vec<u8>);

impl PackedLists {
    /// Appends a list, and returns its offset in bytes.
    pub(super) fn add<T: bytemuck::NoUninit>(&mut self, list: &[T]) -> usize {
        let at = self.0.len().next_multiple_of(ALIGN);
        self.0.resize(at, 0);
        self.0.extend_from_slice(bytemuck::cast_slice(list));
        at
    }
}

/// The entries of an attention operation, valid for all layers whose pools have the same geometry.
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

/// A merge group's tokens in one entry.
#[derive(Debug)]
pub(super) struct GroupTokens {
    pub(super) group: usize,
    pub(super) tokens: usize,
    /// The row indices of K and of V.
    pub(super) places: [RowNumbers; 2],
    /// `[1, 1, tokens]`: the factor for each token's logits. `None` if all factors are 1.
    pub(super) factors: Option<Tensor>,
    /// `[1, rows, tokens]`: 0 where a row sees a token, and −∞ elsewhere. `None` if all rows see all tokens.
    pub(super) mask: Option<Tensor>,
    pub(super) rotation: Option<KeyRotation>,
}

/// The rotation to apply to a run's keys when they are read.
#[derive(Debug)]
pub(super) struct KeyRotation {
    /// The distinct rotation angles, as positions.
    pub(super) distinct: Vec<i64>,
    /// The index of each token's angle in `distinct`.
    pub(super) which: Tensor,
}

/// A plan's angles: one set for each entry's queries, and one for each run's keys.
#[derive(Debug)]
pub(crate) struct PlanAngles {
    pub(super) queries: Vec<SentAngles>,
    pub(super) keys: Vec<Vec<Option<SentAngles>>>,
}

/// A step's sequences as block tables, or `None` if block tables cannot express the step's work.
#[derive(Debug)]
pub(crate) struct DecodeTables(pub(super) Option<SequenceTables>);

/// Block tables, one per row.
#[derive(Debug)]
pub(super) struct SequenceTables {
    pub(super) table: SentTensor,
    /// Number of tokens per sequence.
    pub(super) lengths: Vec<i64>,
    /// The total number of blocks in all sequences.
    pub(super) blocks: usize,
    /// The positions to which the queries are rotated.
    pub(super) positions: Vec<i64>,
}

/// The capacity of rows that are computed side by side. One set of operators handles any tokens that fit into
/// this capacity.
#[derive(Debug, Clone)]
pub(super) struct RowRoom {
    pub(super) keys: KeyForm,
    pub(super) rope: Option<Arc<Rope>>,
    pub(super) rows: usize,
    /// The maximum number of tokens per row.
    pub(super) tokens: usize,
    /// The maximum number of distinct angles by which keys are rotated.
    pub(super) angles: usize,
    /// The geometries of K and V.
    pub(super) geometry: [PlaneGeometry; 2],
    /// The factor for each merge group's log-sum-exp.
    pub(super) groups: Vec<f32>,
}

/// The lists of a [`RowRoom`] on the device.
#[derive(Debug)]
pub(crate) struct RoomLists {
    pub(super) room: RowRoom,
    /// The address of the first list.
    pub(super) at: u64,
    pub(super) layout: RoomLayout,
    /// The lists' memory, or `None` if each replay of a graph provides the lists.
    pub(super) list: Option<Arc<ListMemory>>,
}

/// The offsets of a [`RowRoom`]'s lists, in bytes.
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
    /// Holds the lists' memory until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        work.hold_list(&self.lists);
    }
}

impl PlanAngles {
    /// Holds the angles' memory until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        let keys = self.keys.iter().flatten().flatten();
        self.queries.iter().chain(keys).for_each(|angles| angles.hold(work));
    }
}

impl DecodeTables {
    /// Holds the tables' memory until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        if let Some(tables) = &self.0 {
            tables.table.hold(work);
        }
    }
}

impl RoomLists {
    /// Holds the lists' memory until the work is done. Lists that replays provide need no hold, because the
    /// graph holds them.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        if let Some(list) = &self.list {
            work.hold_list(list);
        }
    }
}
