//! Plans: lists on the device, such as indices, angles and masks, that a step's layers share.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use kvcore::device::queue::Recent;
use kvcore::{Attend, KeyForm, Result, Rope, SlotMapping};

use super::angles::SentAngles;
use super::attend::lists::{AttentionPlan, DecodeTables, PlanAngles, RoomLists};
use super::geometry::{PlaneGeometry, RowGeometry};
use super::sent::SentTensor;
use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::Work;

/// Number of plans that a stream keeps. A step needs only a few: indices of K and V, angles, and attention's
/// lists.
const KEPT: usize = 16;

/// Identifies a list on the device by its contents. A key holds the values that it compares by address, so no
/// other value can be allocated at the same address.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum PlanKey {
    /// A single number, given by its bits.
    Number(u32),
    /// The indices of the rows that have a slot.
    Rows(SlotsKey),
    /// The matrix rows of slots.
    Places(SlotsKey, RowGeometry),
    /// The indices of the rows that a captured step writes.
    CapturedRows { count: usize },
    /// The matrix rows of the slots that a captured step writes.
    CapturedPlaces(RowGeometry),
    /// The angles for one distance.
    Distance { rope: ByAddress<Rope>, delta: i64 },
    /// The angles for positions, multiplied by the embedding's attention factor.
    Positions { rope: ByAddress<Rope>, positions: ByAddress<[i64]> },
    /// The angles for the positions of the rows that have a slot.
    SlotPositions { slots: SlotsKey, rope: ByAddress<Rope>, positions: ByAddress<[i64]> },
    /// The angles for all positions of a captured step or, if `written` is true, for its rows that have a
    /// slot.
    CapturedPositions { rope: ByAddress<Rope>, count: usize, written: bool },
    /// The tokens of each merge group, for attention that computes its entries one after another.
    Attention { work: AttentionKey, planes: [PlaneGeometry; 2] },
    /// The angles of queries and keys, for attention that computes its entries one after another.
    AttentionAngles { work: AttentionKey, rope: ByAddress<Rope> },
    /// The tokens of all rows, for attention that computes its rows side by side.
    SideBySide { work: AttentionKey, planes: [PlaneGeometry; 2], rope: Option<ByAddress<Rope>> },
    /// The block tables of decoding sequences.
    Sequences { work: u64, block_size: usize, window: Option<usize> },
    /// The angles for the queries of decoding sequences.
    SequenceAngles { work: u64, window: Option<usize>, rope: ByAddress<Rope> },
}

/// A shared value that is compared by address.
#[derive(Debug)]
pub(super) struct ByAddress<T: ?Sized>(pub(super) Arc<T>);

impl<T: ?Sized> ByAddress<T> {
    pub(super) fn of(known: &Arc<T>) -> Self {
        Self(Arc::clone(known))
    }
}

impl<T: ?Sized> Clone for ByAddress<T> {
    fn clone(&self) -> Self {
        Self::of(&self.0)
    }
}

impl<T: ?Sized> PartialEq for ByAddress<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The slots of an operation. If several rows have the same slot, a write uses the last one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SlotsKey {
    pub(super) slots: ByAddress<[i64]>,
    pub(super) written: bool,
}

impl SlotsKey {
    pub(super) fn written(slots: &SlotMapping) -> Self {
        Self { slots: ByAddress::of(slots.slots()), written: true }
    }

    pub(super) fn read(slots: &Arc<[i64]>) -> Self {
        Self { slots: ByAddress::of(slots), written: false }
    }
}

/// An attention operation's work, identified by its ID, because the owner may edit the work itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct AttentionKey {
    pub(super) work: u64,
    pub(super) window: Option<usize>,
    pub(super) keys: KeyForm,
}

impl AttentionKey {
    pub(super) fn of(op: &Attend) -> Self {
        Self { work: op.work.id(), window: op.window, keys: op.keys }
    }
}

/// A value that a step's layers share, and that a [`KeptPlan`] can contain.
pub(super) trait Planned: Sized {
    /// Returns the value, if the plan is of this kind.
    fn of(plan: &KeptPlan) -> Option<Self>;

    /// Wraps the value in a plan.
    fn plan(&self) -> KeptPlan;
}

/// Defines the kinds of plans.
macro_rules! plans {
    ($($(#[$doc:meta])* $kind:ident($type:ty),)*) => {
        /// The value that was built for a key.
        #[derive(Debug, Clone)]
        pub(super) enum KeptPlan {
            $($(#[$doc])* $kind($type),)*
        }

        $(impl Planned for $type {
            fn of(plan: &KeptPlan) -> Option<Self> {
                if let KeptPlan::$kind(known) = plan { Some(known.clone()) } else { None }
            }

            fn plan(&self) -> KeptPlan {
                KeptPlan::$kind(self.clone())
            }
        })*
    };
}

plans! {
    /// The address of a list that each replay rewrites.
    Replayed(u64),
    Sent(SentTensor),
    Angles(SentAngles),
    Attention(Arc<AttentionPlan>),
    AttentionAngles(Arc<PlanAngles>),
    SideBySide(Arc<RoomLists>),
    Sequences(Arc<DecodeTables>),
}

impl KeptPlan {
    /// Holds the plan's memory until the work is done. Lists that replays provide need no hold, because the
    /// graph holds them.
    fn hold(&self, work: &mut Work<'_>) {
        match self {
            Self::Replayed(_) => {}
            Self::Sent(sent) => sent.hold(work),
            Self::Angles(angles) => angles.hold(work),
            Self::Attention(plan) => plan.hold(work),
            Self::AttentionAngles(angles) => angles.hold(work),
            Self::SideBySide(lists) => lists.hold(work),
            Self::Sequences(tables) => tables.hold(work),
        }
    }
}

/// The plans of the most recent operations on a stream or in a capture.
#[derive(Debug, Default)]
pub(crate) struct RecentPlans(Recent<PlanKey, KeptPlan, KEPT>);

/// An operation's work, with the plans that its step's layers share.
pub(crate) struct StepWork<'a, 'w> {
    pub(crate) work: &'a mut Work<'w>,
    pub(crate) plans: &'a mut RecentPlans,
}

impl<'w> Deref for StepWork<'_, 'w> {
    type Target = Work<'w>;

    fn deref(&self) -> &Work<'w> {
        self.work
    }
}

impl DerefMut for StepWork<'_, '_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.work
    }
}

impl StepWork<'_, '_> {
    /// Returns the value that an earlier layer built for this key, or builds it if there is none. Holds its
    /// memory until the work is done.
    ///
    /// # Errors
    /// Returns the error of `make`, if it fails.
    pub(super) fn shared<T: Planned>(
        &mut self,
        key: PlanKey,
        make: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if let Some(plan) = self.plans.0.get(&key)
            && let Some(known) = T::of(plan)
        {
            plan.hold(self.work);
            return Ok(known);
        }
        let made = make(self)?;
        self.plans.0.keep(key, made.plan());
        Ok(made)
    }

    /// Returns a tensor on the device, `[1, 1, 1]` in f32, that contains the given number.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn number(&mut self, number: f32) -> Result<Tensor> {
        let send = |work: &mut Self| SentTensor::send(work, &[number], sys::ACL_FLOAT, &[1, 1, 1]);
        Ok(self.shared(PlanKey::Number(number.to_bits()), send)?.tensor)
    }

    /// Returns the angles that rotate all rows by `delta` positions.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn angles_of_distance(&mut self, rope: &Arc<Rope>, delta: i64) -> Result<SentAngles> {
        let key = PlanKey::Distance { rope: ByAddress::of(rope), delta };
        self.shared(key, |work| SentAngles::send(work, rope, &[delta], 1.0))
    }
}
