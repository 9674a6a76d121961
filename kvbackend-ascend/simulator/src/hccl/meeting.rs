//! Meetings of the ranks' tasks. Each task contributes its part, and the last task to arrive moves all of the
//! data.

use std::collections::HashMap;
use std::mem::discriminant;
use std::ops::Range;

use crate::clock::TaskMoment;
use crate::state::SimState;
use crate::tensor::{load, store};
use crate::types as sys;

/// A flag that is set in the IDs of exchanges.
const EXCHANGES: u64 = 1 << 63;

/// A rank's action in a collective.
#[derive(Debug, Clone)]
pub(crate) enum What {
    Broadcast { bytes: Range<u64>, root: usize },
    Gather { from: Range<u64>, to: Range<u64> },
    Reduce { from: Range<u64>, to: Range<u64>, dtype: sys::HcclDataType, op: sys::HcclReduceOp },
    Exchange(Vec<RankTransfer>),
}

/// One rank's side of a transfer: the address range that it sends to `peer` or receives from it.
#[derive(Debug, Clone)]
pub(crate) struct RankTransfer {
    pub(crate) peer: usize,
    pub(crate) sends: bool,
    pub(crate) bytes: Range<u64>,
}

/// A rank's task in a collective.
pub(crate) struct RankPart {
    pub(crate) group: u64,
    pub(crate) rank: usize,
    /// The ID of the collective, which all ranks share, or of the exchange, which is counted per rank.
    pub(crate) number: u64,
    /// The rank's part, or `None` after its task has reached the front of its stream.
    pub(crate) what: Option<What>,
}

/// A rank's part of a collective, which is waiting for the other ranks' parts.
struct Brought {
    rank: usize,
    what: What,
    moment: TaskMoment,
}

/// Half of a transfer, which is waiting for the other half.
struct Half {
    from: usize,
    to: usize,
    /// The ID of the exchange, on the rank that contributed this half.
    number: u64,
    transfer: RankTransfer,
    moment: TaskMoment,
}

/// A group's unfinished collectives.
#[derive(Default)]
pub(crate) struct RankMeeting {
    pub(crate) ranks: usize,
    /// The number of collectives or exchanges so far, by rank and kind; `true` means exchanges.
    next: HashMap<(usize, bool), u64>,
    waiting: HashMap<u64, Vec<Brought>>,
    /// The finished collectives, each with the number of ranks whose task has not seen the end yet.
    done: HashMap<u64, usize>,
    halves: Vec<Half>,
    /// The error that ends every wait, if the group has failed.
    pub(crate) failed: Option<sys::HcclResult>,
}

impl RankMeeting {
    /// Returns the ID of a rank's next collective.
    pub(super) fn number(&mut self, rank: usize, what: &What) -> u64 {
        let exchanges = matches!(what, What::Exchange(_));
        let next = self.next.entry((rank, exchanges)).or_default();
        *next += 1;
        *next | if exchanges { EXCHANGES } else { 0 }
    }

    /// Removes the parts that a stream has contributed.
    pub(super) fn withdraw(&mut self, stream: u64) {
        self.waiting.values_mut().for_each(|all| all.retain(|brought| brought.moment.stream != stream));
        self.halves.retain(|half| half.moment.stream != stream);
    }
}

/// The stream on which a fault occurred, and its description.
type Fault = (u64, String);

fn differ(a: &What, b: &What) -> bool {
    let size = |what: &What| match what {
        What::Broadcast { bytes, .. } => bytes.end - bytes.start,
        What::Gather { from, .. } | What::Reduce { from, .. } => from.end - from.start,
        What::Exchange(_) => 0,
    };
    let same = match (a, b) {
        (What::Broadcast { root: a, .. }, What::Broadcast { root: b, .. }) => a == b,
        (What::Reduce { dtype: a, op: x, .. }, What::Reduce { dtype: b, op: y, .. }) => (a, x) == (b, y),
        _ => discriminant(a) == discriminant(b),
    };
    !same || size(a) != size(b)
}

impl SimState {
    /// Contributes the part of a task, which must have reached the front of its stream. Returns whether the
    /// task is done.
    pub(crate) fn meet(&mut self, part: &mut RankPart, moment: &TaskMoment) -> bool {
        let met = match part.what.take() {
            Some(What::Exchange(transfers)) => self.exchange(part, transfers, moment),
            Some(what) => self.gather_round(part, what, moment),
            None => Ok(()),
        };
        if let Err((address, fault)) = met {
            if let Some(device) = self.device_of(address) {
                self.devices[device].lost.get_or_insert(fault);
            }
            self.fail(part.group, sys::HCCL_E_REMOTE);
        }
        self.is_met(part)
    }

    fn fail(&mut self, group: u64, code: sys::HcclResult) {
        if let Some(meeting) = self.hccl.meeting(group) {
            meeting.failed.get_or_insert(code);
        }
        crate::state::changed();
    }

    fn is_met(&mut self, part: &RankPart) -> bool {
        let Some(meeting) = self.hccl.meeting(part.group) else { return false };
        if meeting.failed.is_some() {
            return false;
        }
        if let Some(left) = meeting.done.get_mut(&part.number) {
            *left -= 1;
            if *left == 0 {
                meeting.done.remove(&part.number);
            }
            return true;
        }
        let brought = |half: &Half| {
            (if half.transfer.sends { half.from } else { half.to }, half.number) == (part.rank, part.number)
        };
        part.number & EXCHANGES != 0 && !meeting.halves.iter().any(brought)
    }

    /// Contributes a part to a collective of all ranks.
    fn gather_round(&mut self, part: &RankPart, what: What, moment: &TaskMoment) -> Result<(), Fault> {
        let Some(meeting) = self.hccl.meeting(part.group) else { return Ok(()) };
        let (ranks, waiting) = (meeting.ranks, meeting.waiting.entry(part.number).or_default());
        if waiting.iter().any(|known| differ(&known.what, &what)) {
            self.fail(part.group, sys::HCCL_E_PARA);
            return Ok(());
        }
        waiting.push(Brought { rank: part.rank, what, moment: moment.clone() });
        if waiting.len() < ranks {
            return Ok(());
        }
        let mut all = meeting.waiting.remove(&part.number).unwrap_or_default();
        meeting.done.insert(part.number, ranks);
        all.sort_by_key(|brought| brought.rank);
        self.move_all(&all)?;
        crate::state::changed();
        Ok(())
    }

    fn place(&mut self, bytes: &Range<u64>, moment: &TaskMoment, writes: bool) -> Result<*mut u8, Fault> {
        self.touch(bytes, moment, writes).map_err(|fault| (bytes.start, fault))
    }

    fn read(&mut self, bytes: &Range<u64>, moment: &TaskMoment) -> Result<Vec<u8>, Fault> {
        let at = self.place(bytes, moment, false)?;
        // SAFETY: the range is alive.
        Ok(unsafe { std::slice::from_raw_parts(at, (bytes.end - bytes.start) as usize) }.to_vec())
    }

    fn write(&mut self, to: &Range<u64>, moment: &TaskMoment, bytes: &[u8]) -> Result<(), Fault> {
        let at = self.place(to, moment, true)?;
        // SAFETY: the range is alive and has the same length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    /// Moves a collective's data once all ranks have contributed their part.
    fn move_all(&mut self, all: &[Brought]) -> Result<(), Fault> {
        match &all[0].what {
            What::Broadcast { root, .. } => {
                let root = *root;
                let range = |brought: &Brought| match &brought.what {
                    What::Broadcast { bytes, .. } => bytes.clone(),
                    _ => 0..0,
                };
                let sent = self.read(&range(&all[root]), &all[root].moment)?;
                all.iter()
                    .filter(|to| to.rank != root)
                    .try_for_each(|to| self.write(&range(to), &to.moment, &sent))
            }
            What::Gather { .. } => {
                let mut gathered = Vec::new();
                for brought in all {
                    if let What::Gather { from, .. } = &brought.what {
                        gathered.extend(self.read(from, &brought.moment)?);
                    }
                }
                all.iter().try_for_each(|brought| match &brought.what {
                    What::Gather { to, .. } => self.write(to, &brought.moment, &gathered),
                    _ => Ok(()),
                })
            }
            &What::Reduce { dtype, op, .. } => {
                let mut result: Option<Vec<u8>> = None;
                for brought in all {
                    let What::Reduce { from, .. } = &brought.what else { continue };
                    let own = self.read(from, &brought.moment)?;
                    result = Some(match result {
                        None => own,
                        Some(before) => combined(dtype, op, before, &own),
                    });
                }
                let result = result.unwrap_or_default();
                all.iter().try_for_each(|brought| match &brought.what {
                    What::Reduce { to, .. } => self.write(to, &brought.moment, &result),
                    _ => Ok(()),
                })
            }
            What::Exchange(_) => Ok(()),
        }
    }

    /// Contributes an exchange's transfers, and moves the data of each transfer whose other half has arrived.
    fn exchange(
        &mut self,
        part: &RankPart,
        transfers: Vec<RankTransfer>,
        moment: &TaskMoment,
    ) -> Result<(), Fault> {
        for transfer in transfers {
            let (from, to) =
                if transfer.sends { (part.rank, transfer.peer) } else { (transfer.peer, part.rank) };
            let Some(meeting) = self.hccl.meeting(part.group) else { return Ok(()) };
            let other = meeting
                .halves
                .iter()
                .position(|half| (half.from, half.to) == (from, to) && half.transfer.sends != transfer.sends);
            let Some(other) = other else {
                let (number, moment) = (part.number, moment.clone());
                meeting.halves.push(Half { from, to, number, transfer, moment });
                continue;
            };
            let other = meeting.halves.remove(other);
            let own = (&transfer.bytes, moment);
            let theirs = (&other.transfer.bytes, &other.moment);
            let ((src, sent), (dst, received)) = if transfer.sends { (own, theirs) } else { (theirs, own) };
            if src.end - src.start != dst.end - dst.start {
                self.fail(part.group, sys::HCCL_E_PARA);
                return Ok(());
            }
            let bytes = self.read(src, sent)?;
            self.write(dst, received, &bytes)?;
            crate::state::changed();
        }
        Ok(())
    }
}

/// Combines the elements of two ranks.
fn combined(dtype: sys::HcclDataType, op: sys::HcclReduceOp, before: Vec<u8>, own: &[u8]) -> Vec<u8> {
    let f = |a: f32, b: f32| match op {
        sys::HCCL_REDUCE_SUM => a + b,
        sys::HCCL_REDUCE_MAX => a.max(b),
        _ => a.min(b),
    };
    let (dtype, size) = match dtype {
        sys::HCCL_DATA_TYPE_FP32 => (sys::ACL_FLOAT, 4),
        sys::HCCL_DATA_TYPE_FP16 => (sys::ACL_FLOAT16, 2),
        sys::HCCL_DATA_TYPE_BFP16 => (sys::ACL_BF16, 2),
        _ => {
            let wrapped = |a: u8, b: u8| match op {
                sys::HCCL_REDUCE_SUM => a.wrapping_add(b),
                sys::HCCL_REDUCE_MAX => (a as i8).max(b as i8) as u8,
                _ => (a as i8).min(b as i8) as u8,
            };
            return before.iter().zip(own).map(|(&a, &b)| wrapped(a, b)).collect();
        }
    };
    let mut result = before;
    for i in 0..own.len() / size {
        // SAFETY: both have this element.
        unsafe {
            let x = f(load(dtype, result.as_ptr(), i), load(dtype, own.as_ptr(), i));
            store(dtype, result.as_mut_ptr(), i, x);
        }
    }
    result
}
