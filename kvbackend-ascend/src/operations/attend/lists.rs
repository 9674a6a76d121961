//! Lists of attention that the layers of a step share, and the tensors in them.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{KeyForm, Rope};

use crate::operations::angles::SentAngles;
use crate::operations::geometry::{PlaneGeometry, RowNumbers};
use crate::operations::sent::SentTensor;
use crate::operators::Tensor;
use crate::queue::{ListMemory, Work};

/// Alignment of lists that are sent together, in bytes.
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

/// The entries of an attention, for all layers whose pools have one geometry.
#[derive(Debug)]
pub(crate) struct AttentionPlan {
    pub(super) entries: Vec<PlannedEntry>,
    pub(super) lists: Arc<ListMemory>,
}

/// Rows with the same segments.
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
    /// Numbers of the rows of K and V.
    pub(super) places: [RowNumbers; 2],
    /// `[1, 1, tokens]`: the factors of the tokens' logits. None if all are 1.
    pub(super) factors: Option<Tensor>,
    /// `[1, rows, tokens]`: 0 where a row sees a token, and −∞ elsewhere. None if all rows see all tokens.
    pub(super) mask: Option<Tensor>,
    pub(super) rotation: Option<KeyRotation>,
}

/// The rotation of a run's keys as they are read.
#[derive(Debug)]
pub(super) struct KeyRotation {
    /// The angles that occur, as positions.
    pub(super) distinct: Vec<i64>,
    /// The number of each token's angle.
    pub(super) which: Tensor,
}

/// The angles of a plan: of the queries of each entry, and of the keys of each run.
#[derive(Debug)]
pub(crate) struct PlanAngles {
    pub(super) queries: Vec<SentAngles>,
    pub(super) keys: Vec<Vec<Option<SentAngles>>>,
}

/// The sequences of a step as block tables. None inside if the step's work is not of that form.
#[derive(Debug)]
pub(crate) struct DecodeTables(pub(super) Option<SequenceTables>);

/// One block table for each row.
#[derive(Debug)]
pub(super) struct SequenceTables {
    pub(super) table: SentTensor,
    /// Tokens of each sequence.
    pub(super) lengths: Vec<i64>,
    /// Blocks of all sequences.
    pub(super) blocks: usize,
    /// The positions to which queries are rotated.
    pub(super) positions: Vec<i64>,
}

/// The room of rows side by side: what one set of operators computes, whatever the tokens of a step are.
#[derive(Debug, Clone)]
pub(super) struct RowRoom {
    pub(super) keys: KeyForm,
    pub(super) rope: Option<Arc<Rope>>,
    pub(super) rows: usize,
    /// Tokens of a row.
    pub(super) tokens: usize,
    /// Angles by which keys are rotated.
    pub(super) angles: usize,
    /// The geometry of K and of V.
    pub(super) geometry: [PlaneGeometry; 2],
    /// The factor on the log-sum-exp of each merge group.
    pub(super) groups: Vec<f32>,
}

/// The lists of a room on the device.
#[derive(Debug)]
pub(crate) struct RoomLists {
    pub(super) room: RowRoom,
    /// Address of the first list.
    pub(super) at: u64,
    pub(super) layout: RoomLayout,
    /// The lists' memory; none where each replay of a graph brings the lists.
    pub(super) list: Option<Arc<ListMemory>>,
}

/// Offsets of the lists of a room, in bytes.
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
    /// Holds the table until the work is done.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        if let Some(tables) = &self.0 {
            tables.table.hold(work);
        }
    }
}

impl RoomLists {
    /// Holds the lists until the work is done. A graph holds the lists that its replays bring.
    pub(crate) fn hold(&self, work: &mut Work<'_>) {
        if let Some(list) = &self.list {
            work.hold_list(list);
        }
    }
}
