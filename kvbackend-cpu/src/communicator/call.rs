//! Descriptions of collective calls, which are compared between ranks.

use std::fmt;

use kvcore::{DType, ReduceOp, TensorView};

/// The element type and element count of a view to send. Shapes may differ between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Payload {
    dtype: DType,
    len: usize,
}

impl Payload {
    pub(super) fn of(view: &TensorView) -> Self {
        Self { dtype: view.dtype(), len: view.len() }
    }
}

/// A rank's call. All ranks of the group must make the same broadcast, all-gather or all-reduce, with equal
/// fields. An exchange involves only the ranks that send or receive its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CollectiveCall {
    Broadcast {
        root: usize,
        tensor: Payload,
    },
    AllGather {
        tensor: Payload,
    },
    AllReduce {
        op: ReduceOp,
        tensor: Payload,
    },
    /// An exchange. Its messages are compared one by one, as `Send` and `Receive`.
    Exchange,
    Send {
        to: usize,
        tensor: Payload,
    },
    Receive {
        from: usize,
        tensor: Payload,
    },
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {}", self.len, self.dtype)
    }
}

impl fmt::Display for CollectiveCall {
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
