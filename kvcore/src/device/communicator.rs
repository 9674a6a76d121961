//! Collectives, which transfer tensors between the ranks of a group in stream order.

use std::fmt;

use smallvec::SmallVec;

use crate::base::{DType, Error, Result, same};
use crate::device::operation::apart;
use crate::device::tensor::MAX_RANK;
use crate::device::{Stream, TensorView};

/// The operator of an all-reduce.
///
/// Elements of f32, f16 and bf16 are combined in an order that the implementation chooses; f16 and bf16 may
/// be rounded at each step. A sum of i8 elements wraps. The minimum or maximum of a NaN and a number may be
/// either of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The smallest element.
    Min,
    /// The largest element.
    Max,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
        })
    }
}

/// A transfer between this rank and another rank: the view, and the index of the other rank.
pub type Transfer<'a> = (&'a TensorView, usize);

/// One rank's arguments to a collective operation, by reference. Every view must be contiguous.
#[derive(Debug, Clone, Copy)]
pub enum Collective<'a> {
    /// Copies the view of rank `root` to the views of all other ranks.
    Broadcast {
        /// View to read on `root`, and to write on the other ranks.
        view: &'a TensorView,
        /// Index of the rank that sends its view.
        root: usize,
    },
    /// Copies the source of each rank `r` to part `r` of the destination on every rank.
    AllGather {
        /// View to read, of any shape. May be this rank's part of `dst`, but must not overlap another part.
        src: &'a TensorView,
        /// View to write. Its shape is `[ranks]`, followed by the shape of `src`.
        dst: &'a TensorView,
    },
    /// Combines the views of all ranks element by element. All ranks get the same bits.
    AllReduce {
        /// View to read and write, with elements of type f32, f16, bf16 or i8.
        view: &'a TensorView,
        /// The operator.
        op: ReduceOp,
    },
    /// Sends views to other ranks and receives views from other ranks at the same time. Sends and receives
    /// between the same two ranks are matched in list order.
    Exchange {
        /// Views to read, each with the rank that receives it.
        sends: &'a [Transfer<'a>],
        /// Views to write, each with the rank that sends it.
        receives: &'a [Transfer<'a>],
    },
}

/// Formats the collective for error messages: its kind, and the number and type of this rank's elements, or
/// for an exchange the numbers of sends and receives.
impl fmt::Display for Collective<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = |view: &TensorView| format!("{} elements of {}", view.len(), view.dtype());
        match self {
            Self::Broadcast { view, root } => write!(f, "a broadcast of {} from rank {root}", tensor(view)),
            Self::AllGather { src, .. } => write!(f, "an all-gather of {}", tensor(src)),
            Self::AllReduce { view, op } => write!(f, "an all-reduce ({op}) of {}", tensor(view)),
            Self::Exchange { sends, receives } => {
                write!(f, "an exchange of {} sends and {} receives", sends.len(), receives.len())
            }
        }
    }
}

// Decision: docs/decisions/device.md#checked-is-the-proof-of-a-check
/// A collective that has passed its check. Only [`Collective::checked`] creates values of this type.
#[derive(Debug, Clone, Copy)]
pub struct CheckedCollective<'a>(Collective<'a>);

impl<'a> CheckedCollective<'a> {
    /// Returns the checked collective.
    pub fn collective(self) -> Collective<'a> {
        self.0
    }
}

impl<'a> Collective<'a> {
    /// Returns all views that the collective reads or writes.
    pub fn views(self) -> SmallVec<[&'a TensorView; 4]> {
        match self {
            Self::Broadcast { view, .. } | Self::AllReduce { view, .. } => SmallVec::from_slice(&[view]),
            Self::AllGather { src, dst } => SmallVec::from_slice(&[src, dst]),
            Self::Exchange { sends, receives } => {
                receives.iter().chain(sends).map(|(view, _)| *view).collect()
            }
        }
    }

    /// Checks everything that rank `rank` of `ranks` ranks can check on its own, and returns the proof that
    /// [`Communicator::launch`] requires.
    ///
    /// # Errors
    /// - Returns [`Error::InvalidStrides`] for a view that is not contiguous, and [`Error::NotMultiple`] for
    ///   a view that ends inside a byte.
    /// - Returns [`Error::OutOfRange`] for a rank that the group does not have.
    /// - Returns [`Error::Mismatch`] if the source and the destination do not match.
    /// - Returns [`Error::Aliased`] if a written view overlaps another view.
    /// - Returns [`Error::Unsupported`] for a reduction of an element type other than f32, f16, bf16 and i8,
    ///   and for a transfer from a rank to itself.
    pub fn checked(self, rank: usize, ranks: usize) -> Result<CheckedCollective<'a>> {
        self.views().into_iter().try_for_each(dense)?;
        let in_group = |peer| if peer < ranks { Ok(()) } else { Err(Error::range("rank", peer, ranks)) };
        match self {
            Self::Broadcast { root, .. } => in_group(root)?,
            Self::AllGather { src, dst } => fits(rank, ranks, src, dst)?,
            Self::AllReduce { view, .. } => match view.dtype() {
                DType::F32 | DType::F16 | DType::BF16 | DType::I8 => {}
                other => {
                    return Err(unsupported(format!("a reduction of {other}; use f32, f16, bf16 or i8")));
                }
            },
            Self::Exchange { sends, receives } => {
                for &(_, peer) in receives.iter().chain(sends) {
                    in_group(peer)?;
                    if peer == rank {
                        return Err(unsupported(format!("a transfer of rank {rank} to itself")));
                    }
                }
                for (at, (written, _)) in receives.iter().enumerate() {
                    let mut others = receives[at + 1..].iter().chain(sends);
                    others.try_for_each(|(view, _)| apart("views of an exchange", written, view))?;
                }
            }
        }
        Ok(CheckedCollective(self))
    }
}

/// Checks that a view is one contiguous run of whole bytes.
fn dense(view: &TensorView) -> Result<()> {
    if !view.is_contiguous() {
        let reason = "the view is not contiguous; copy it first".to_owned();
        return Err(Error::InvalidStrides { what: "a collective", reason });
    }
    let (value, of) = (view.len(), (8 / view.dtype().bits()).max(1));
    let what = "number of elements of a collective";
    if value.is_multiple_of(of) { Ok(()) } else { Err(Error::NotMultiple { what, value, of }) }
}

/// Checks the operands of an all-gather.
fn fits(rank: usize, ranks: usize, src: &TensorView, dst: &TensorView) -> Result<()> {
    same("all-gather", dst.dtype(), src.dtype())?;
    same("rank of an all-gather's destination", src.shape().len() + 1, dst.shape().len())?;
    same("parts of an all-gather's destination", ranks, dst.shape()[0])?;
    for (&expected, &got) in src.shape().iter().zip(&dst.shape()[1..]) {
        same("extent of a part of an all-gather", expected, got)?;
    }
    let start = |view: &TensorView| view.address(&[0; MAX_RANK][..view.shape().len()]);
    if !src.overlaps(dst)? || start(src)? == start(&dst.select(0, rank)?)? {
        return Ok(());
    }
    Err(Error::Aliased { what: "source and destination of an all-gather" })
}

fn unsupported(what: String) -> Error {
    Error::Unsupported { backend: "a communicator", what }
}

// Decision: docs/decisions/device.md#collectives-go-through-a-communicator
/// One rank of a group whose ranks exchange tensors. Ranks may be threads of a process, devices or machines.
///
/// # Behaviour
/// - Every rank of the group has its own communicator, used by its own thread. All ranks must call the same
///   collectives, with the same sizes, element types, roots and operators, in the same order. An
///   [exchange](Self::exchange) involves only the ranks of its transfers.
/// - Collectives are enqueued: they run after everything enqueued earlier on the stream, and before
///   everything enqueued later. They hold handles to their memory. All collectives of a communicator must be
///   on one stream, or be ordered by events.
/// - A call may return before the collective is done, or may wait for the other ranks. The caller must not
///   rely on either behaviour. Transfers that wait for each other in a circle (a ring of sends) MUST be one
///   exchange.
/// - [`run`](Self::run) is the only entry point: it checks the collective and the memory, and launches the
///   collective. A rejected collective enqueues nothing. The other ranks then wait for the collective until
///   they time out, or until a rank calls [`abort`](Self::abort).
/// - A failure is final for all ranks. Failures are an abort, a time-out, a lost device, or a rank that left
///   while other ranks need it. Ranks in the same process notice the failure at once, and other ranks when
///   they time out at the latest. After a failure, destinations are undefined, and every later collective
///   returns the error. Other work on the streams continues.
/// - The constructor of each implementation defines the time-out, and the means by which ranks find each
///   other.
/// - When a communicator is dropped, its rank leaves the group. Call [`wait`](Self::wait) first.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// Returns the index of this rank, below [`ranks`](Self::ranks).
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn ranks(&self) -> usize;

    /// Enqueues a checked collective, whose memory must be [owned](Stream::owns) by the stream.
    /// [`run`](Self::run) calls this method.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check) and of the device.
    fn launch(&self, stream: &dyn Stream, collective: CheckedCollective<'_>) -> Result<()>;

    /// Returns the group's failure as an error if the group has failed. Never blocks.
    ///
    /// # Errors
    /// - Returns [`Error::RanksDiffer`] if the implementation noticed that ranks called different
    ///   collectives.
    /// - Returns [`Error::RanksTimedOut`] if a collective was not done in time.
    /// - Returns [`Error::RankLeft`] if a collective needed a rank that has left, and [`Error::RankAborted`]
    ///   if a rank aborted or its device failed. If the reason is unknown on this rank, returns another
    ///   device error instead.
    fn check(&self) -> Result<()>;

    /// Blocks the host until everything enqueued on the stream so far is done, including collectives, but no
    /// longer than the time-out.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check) and of [`Stream::synchronize`].
    fn wait(&self, stream: &dyn Stream) -> Result<()>;

    /// Ends the group permanently. Pending collectives end at once on the ranks of this process, and on other
    /// ranks when they notice the abort. Has no effect if the group has already failed.
    fn abort(&self);

    /// Checks and launches a collective.
    ///
    /// # Errors
    /// Returns the errors of [`Collective::checked`], [`Stream::owns`] and [`launch`](Self::launch), in this
    /// order.
    fn run(&self, stream: &dyn Stream, collective: Collective<'_>) -> Result<()> {
        let checked = collective.checked(self.rank(), self.ranks())?;
        collective.views().iter().try_for_each(|view| stream.owns(view.storage()))?;
        self.launch(stream, checked)
    }

    /// Runs [`Collective::Broadcast`].
    fn broadcast(&self, stream: &dyn Stream, view: &TensorView, root: usize) -> Result<()> {
        self.run(stream, Collective::Broadcast { view, root })
    }

    /// Runs [`Collective::AllGather`].
    fn all_gather(&self, stream: &dyn Stream, src: &TensorView, dst: &TensorView) -> Result<()> {
        self.run(stream, Collective::AllGather { src, dst })
    }

    /// Runs [`Collective::AllReduce`].
    fn all_reduce(&self, stream: &dyn Stream, view: &TensorView, op: ReduceOp) -> Result<()> {
        self.run(stream, Collective::AllReduce { view, op })
    }

    /// Sends a view to rank `to`, which must call [`receive`](Self::receive) or a matching exchange.
    fn send(&self, stream: &dyn Stream, view: &TensorView, to: usize) -> Result<()> {
        self.exchange(stream, &[(view, to)], &[])
    }

    /// Receives a view from rank `from`, which must call [`send`](Self::send) or a matching exchange.
    fn receive(&self, stream: &dyn Stream, view: &TensorView, from: usize) -> Result<()> {
        self.exchange(stream, &[], &[(view, from)])
    }

    /// Runs [`Collective::Exchange`].
    fn exchange(&self, stream: &dyn Stream, sends: &[Transfer<'_>], receives: &[Transfer<'_>]) -> Result<()> {
        self.run(stream, Collective::Exchange { sends, receives })
    }
}
