//! Streams, and the lists, holds and launches of their enqueued work.
//!
//! An operation is lowered to launches under the stream's lock, and the launches are enqueued at once. The
//! host never waits for the operation. Lists that kernels read (slots, attention plans) are uploaded on the
//! same stream, once for all layers that share them. The stream holds the memory of enqueued work until an
//! event marks the work as done. While a thread is capturing, its work is added to a graph instead
//! ([`capture`]). The graph owns its memory, and each replay writes the lists that the graph reads.
//!
//! ```text
//!   raw      driver handles
//!   upload   memory of lists, on the host and on the device
//!   lists    lists that layers share, and lists of a captured step
//!   plans    attention plans that layers share
//!   state    a stream, with its holds, uploads, lists and plans
//!   capture  driver captures
//!   event    points in the order of a stream
//!   lowering one operation: its lists, holds and launches; its enqueueing
//!   graph    captured work and its replay
//! ```

pub(crate) mod capture;
mod event;
mod graph;
mod lists;
mod lowering;
mod plans;
mod raw;
mod state;
mod upload;

pub use event::CudaEvent;
pub(crate) use graph::CudaGraph;
pub(crate) use lists::StepList;
pub(crate) use lowering::{Launch, Lowering};
pub(crate) use plans::{AttendPlan, AttendPlanKey, PlanChunk, SharedPlaces};
pub(crate) use raw::RawStream;
pub use state::CudaStream;
pub(crate) use state::CudaStreamState;
