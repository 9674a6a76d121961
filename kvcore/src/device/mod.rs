//! The backend contract, through which caches and engines use a device.
//!
//! A backend implements [`Backend`] (memory), [`Stream`] and [`Event`] (order), and runs each [`operation`].
//! Tensor views and arenas give typed access to its memory. A [`Communicator`] moves tensors between ranks.

mod arena;
pub mod backend;
pub mod capture;
mod communicator;
pub mod graph;
pub mod operation;
mod owned;
mod permit;
pub mod queue;
pub mod tensor;

pub use arena::{KvArena, KvPlane};
pub use backend::{
    Backend, Capabilities, CounterSnapshot, Counters, DoneCall, Event, EventDone, ReservedStorage, Storage,
    Stream, allocate_tensor, call_when_done, check_granules, whole_granules,
};
pub use capture::{CaptureGate, CapturePass, ReplayCheck};
pub use communicator::{CheckedCollective, Collective, Communicator, ReduceOp, Transfer};
pub use graph::{Graph, GraphCache, GraphCounts, GraphKey, GraphRun, StepInputs};
pub use operation::{
    ApplyRope, Attend, AttendMass, AttendMla, AttendRows, AttendWork, Checked, CopyBlocks, CopyTensor,
    Dequantize, Gather, MergeGroup, OPTIONAL, Operation, Quantize, QueryRow, REQUIRED, RotateKeys, Rotation,
    RowRotation, Scatter, Segment, Selection, SelectionUnit, SwapBlocks,
};
pub use owned::OwnedStorage;
pub(crate) use permit::Permits;
pub use permit::{WritePairs, WriteSlots};
pub use tensor::{Dims, TensorView};
