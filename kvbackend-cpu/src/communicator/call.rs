//! The call of a rank, to compare with the calls of others.

use std::fmt;

use kvcore::{DType, ReduceOp, TensorView};

/// Element type and number of elements of a view that travels. Ranks may call with different shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tensor {
    dtype: DType,
    len: usize,
}

impl Tensor {
    pub(super) fn of(view: &TensorView) -> Self {
        Self { dtype: view.dtype(), len: view.len() }
    }
}

/// A call of a collective. Calls of ranks that meet are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    Broadcast {
        root: usize,
        tensor: Tensor,
    },
    AllGather {
        tensor: Tensor,
    },
    AllReduce {
        op: ReduceOp,
        tensor: Tensor,
    },
    /// An exchange. Its messages are compared one by one.
    Exchange,
    Send {
        to: usize,
        tensor: Tensor,
    },
    Receive {
        from: usize,
        tensor: Tensor,
    },
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {}", self.len, self.dtype)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broadcast { root, tensor } => write!(f, "a broadcast of {tensor} from rank {root}"),
            Self::AllGather { tensor } => write!(f, "an all-gather of {tensor}"),
            Self::AllReduce { op, tensor } => write!(f, "an all-reduce ({op}) of {tensor}"),
            Self::Exchange => f.write_str("an exchange"),
            Self::Send { to, tensor } => write!(f, "a send of {tensor} to rank {to}"),
            Self::Receive { from, tensor } => write!(f, "a receive of {tensor} from rank {from}"),
        }
    }
}
