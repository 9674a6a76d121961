//! Counts of the bytes that kernels moved. Counting costs one relaxed addition per operation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters of a backend.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// The counts of [`Counters`] at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct CounterSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Returns the current counts.
            pub fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.load(Relaxed),)* }
            }

            /// Adds the counts of a snapshot, for work that is counted each time it is replayed.
            pub fn add_all(&self, counts: &CounterSnapshot) {
                $(self.$name.fetch_add(counts.$name, Relaxed);)*
            }
        }

        impl CounterSnapshot {
            /// Returns the increase since `earlier`.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Bytes of new K and V rows that `scatter` wrote to cache slots.
    scatter_bytes,
    /// Bytes of cached K and V that `gather` read into rows.
    gather_bytes,
    /// Bytes of cached K and V that `copy_blocks`, `swap_blocks` and `rotate_keys` copied.
    block_copy_bytes,
    /// Bytes of tensors that `copy_tensor` wrote.
    tensor_copy_bytes,
    /// Bytes of rows that `rope` rotated in place.
    rope_bytes,
    /// Bytes of quantised blocks that `quantize` wrote.
    quantize_bytes,
    /// Bytes of dense blocks that `dequantize` wrote.
    dequantize_bytes,
    /// Bytes that `write` copied from the host.
    host_write_bytes,
    /// Bytes that `read` copied to the host.
    host_read_bytes,
    /// Number of calls to `attend` and `attend_mla`.
    attend_calls,
    /// Bytes of segments, rows and block tables that attention uploaded for device kernels. Layers that share
    /// an [`AttendWork`](crate::AttendWork) share the upload.
    plan_bytes,
    /// Number of times recorded work was submitted to a device. Always 0 if work runs as soon as it is
    /// enqueued.
    submissions,
}

impl Counters {
    /// Adds `n` to `counter`.
    pub fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Relaxed);
    }
}
