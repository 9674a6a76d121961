//! Counts of bytes that kernels moved. They cost one relaxed addition per operation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters of a backend; see [`CounterSnapshot`] for the meaning of each.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// Counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct CounterSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// The values now.
            pub fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.load(Relaxed),)* }
            }
        }

        impl CounterSnapshot {
            /// What happened between `earlier` and `self`.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Bytes of new K and V rows written to cache slots by `scatter`.
    scatter_bytes,
    /// Bytes of cached K and V read into rows by `gather`.
    gather_bytes,
    /// Bytes of cached K and V duplicated by `copy_blocks`, `swap_blocks` and `rotate_keys`.
    block_copy_bytes,
    /// Bytes of tensors written by `copy_tensor`.
    tensor_copy_bytes,
    /// Bytes of quantised blocks written by `quantize`.
    quantize_bytes,
    /// Bytes of dense blocks written by `dequantize`.
    dequantize_bytes,
    /// Bytes that came from the host by `write`.
    host_write_bytes,
    /// Bytes that went to the host by `read`.
    host_read_bytes,
    /// Calls of `attend` and `attend_mla`.
    attend_calls,
    /// Times that recorded work was given to a device; none where work runs as it is enqueued.
    submissions,
}

impl Counters {
    /// Adds `n` to `counter`.
    pub fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Relaxed);
    }
}
