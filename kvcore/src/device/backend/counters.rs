//! Counters of the bytes that kernels have moved. Counting costs one relaxed addition per operation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The live counters of a backend.
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

            /// Adds the counts of a snapshot, for captured work that is counted on each replay.
            pub fn add_all(&self, counts: &CounterSnapshot) {
                $(self.$name.fetch_add(counts.$name, Relaxed);)*
            }
        }

        impl CounterSnapshot {
            /// Returns the increase of each count since the snapshot `earlier`.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Number of bytes that `scatter` wrote to the cache.
    scatter_bytes,
    /// Number of bytes that `gather` read from the cache.
    gather_bytes,
    /// Number of bytes that `copy_blocks`, `swap_blocks` and `rotate_keys` copied.
    block_copy_bytes,
    /// Number of bytes that `copy_tensor` wrote.
    tensor_copy_bytes,
    /// Number of bytes that `rope` rotated in place.
    rope_bytes,
    /// Number of bytes that `quantize` wrote.
    quantize_bytes,
    /// Number of bytes that `dequantize` wrote.
    dequantize_bytes,
    /// Number of bytes that `write` copied from the host.
    host_write_bytes,
    /// Number of bytes that `read` copied to the host.
    host_read_bytes,
    /// Number of calls to `attend` and `attend_mla`.
    attend_calls,
    /// Number of calls to `attend_mass`.
    mass_calls,
    /// Number of bytes of segments, rows and block tables that were uploaded for attention kernels. Layers
    /// that share an [`AttendWork`](crate::AttendWork) share the upload.
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
