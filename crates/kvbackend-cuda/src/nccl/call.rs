//! The call of a rank, as errors name it.

use std::fmt;

use kvcore::{Collective, DType, ReduceOp, TensorView};

/// A call of a rank that may wait for other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// The constructor.
    Join,
    Broadcast(Tensor, usize),
    AllGather(Tensor),
    AllReduce(Tensor, ReduceOp),
    Exchange {
        sends: usize,
        receives: usize,
    },
    /// A wait on which no collective was pending.
    Wait,
}

/// Element type and number of elements of a view that travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tensor {
    len: usize,
    dtype: DType,
}

impl Tensor {
    fn of(view: &TensorView) -> Self {
        Self { len: view.len(), dtype: view.dtype() }
    }
}

impl Call {
    pub(super) fn of(collective: Collective<'_>) -> Self {
        match collective {
            Collective::Broadcast { view, root } => Self::Broadcast(Tensor::of(view), root),
            Collective::AllGather { src, .. } => Self::AllGather(Tensor::of(src)),
            Collective::AllReduce { view, op } => Self::AllReduce(Tensor::of(view), op),
            Collective::Exchange { sends, receives } => {
                Self::Exchange { sends: sends.len(), receives: receives.len() }
            }
        }
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {}", self.len, self.dtype)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Join => f.write_str("the start of the group"),
            Self::Broadcast(tensor, root) => write!(f, "a broadcast of {tensor} from rank {root}"),
            Self::AllGather(tensor) => write!(f, "an all-gather of {tensor}"),
            Self::AllReduce(tensor, op) => write!(f, "an all-reduce ({op}) of {tensor}"),
            Self::Exchange { sends, receives } => {
                write!(f, "an exchange of {sends} sends and {receives} receives")
            }
            Self::Wait => f.write_str("a wait for the stream"),
        }
    }
}
