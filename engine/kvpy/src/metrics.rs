//! A chunk cache's counts and gauges.

use pyo3::prelude::*;

/// Defines the class with its counts, and the conversion from kvchunk's metrics.
macro_rules! metrics {
    ($($count:ident)*) => {
        /// A chunk cache's counts since it was created, and its current gauges.
        #[pyclass(frozen, name = "ChunkCacheMetrics", get_all, module = "kvcache")]
        pub(crate) struct PyChunkCacheMetrics {
            $($count: u64,)*
            hit_rate: f64,
            memory_utilization: f64,
            avg_lookup_time_ms: f64,
            avg_reindex_time_ms: f64,
            avg_compute_time_ms: f64,
        }

        impl From<kvchunk::ChunkCacheMetrics> for PyChunkCacheMetrics {
            fn from(metrics: kvchunk::ChunkCacheMetrics) -> Self {
                Self {
                    $($count: metrics.$count as u64,)*
                    hit_rate: metrics.hit_rate(),
                    memory_utilization: metrics.memory_utilization(),
                    avg_lookup_time_ms: metrics.avg_lookup_time_ms(),
                    avg_reindex_time_ms: metrics.avg_reindex_time_ms(),
                    avg_compute_time_ms: metrics.avg_compute_time_ms(),
                }
            }
        }

        #[pymethods]
        impl PyChunkCacheMetrics {
            fn __repr__(&self) -> String {
                let mut text = "ChunkCacheMetrics(".to_owned();
                $(text += &format!(concat!(stringify!($count), "={}, "), self.$count);)*
                text + &format!("hit_rate={:.2})", self.hit_rate)
            }
        }
    };
}

metrics! {
    lookup_count hit_count miss_count shared_flights insertions evictions uncached tokens_reused tokens_computed
    cached_chunks total_blocks used_blocks
}
