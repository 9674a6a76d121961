//! `KvStorageManager`, its metrics, and the thresholds between tiers.

use kvmanager::{BlockState, PoolMetrics, StorageManager, Tier, TierThresholds};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::CallError;
use crate::pool::{PyBlockPool, PyMutableBlocks, numbers};

/// Tracks the blocks of each request, which are reserved step by step and released together. It does not
/// store keys or values.
#[pyclass(frozen, name = "KvStorageManager", module = "kvcache")]
pub(crate) struct PyKvStorageManager {
    own: StorageManager,
    block_size: usize,
}

#[pymethods]
impl PyKvStorageManager {
    /// Creates a manager of `total_blocks` free blocks of `block_size` tokens.
    #[new]
    fn new(total_blocks: u32, block_size: usize) -> PyResult<Self> {
        if block_size == 0 {
            return Err(CallError::from(kvcore::Error::Zero { what: "block_size" }).into());
        }
        let pool = kvcore::BlockPool::new(0..total_blocks).map_err(CallError::from)?;
        Ok(Self { own: StorageManager::new(pool), block_size })
    }

    /// The number of tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The pool that the blocks belong to. Blocks that were shared under keys can be looked up in this pool.
    #[getter]
    fn pool(&self) -> PyBlockPool {
        self.own.pool().clone().into()
    }

    /// Reserves `num_blocks` more blocks for a request, or none, and returns their IDs. A second reservation
    /// adds to the first (in the design that this method is based on, the first one is lost). Raises
    /// `KvCacheError` if too few blocks are available; in that case, the request keeps the blocks that it
    /// already has.
    fn reserve_blocks(&self, request_id: u64, num_blocks: usize) -> PyResult<Vec<u32>> {
        Ok(numbers(&self.own.reserve(request_id, num_blocks).map_err(CallError::from)?))
    }

    /// Frees all of a request's blocks, and returns the number of blocks. Raises `KvCacheError` for an
    /// unknown request. (The design that this method is based on ignores such a request.)
    fn release_blocks(&self, request_id: u64) -> PyResult<usize> {
        Ok(self.own.release(request_id).map_err(CallError::from)?)
    }

    /// Returns the IDs of a request's blocks, in the order in which they were reserved.
    fn get_blocks(&self, request_id: u64) -> PyResult<Vec<u32>> {
        Ok(numbers(&self.own.blocks(request_id).map_err(CallError::from)?))
    }

    /// Transfers a request's blocks to the caller, which can share them under keys so that later requests
    /// find them in `pool`. The manager then forgets the request.
    fn take_blocks(&self, request_id: u64) -> PyResult<PyMutableBlocks> {
        Ok(PyMutableBlocks::new(self.own.take(request_id).map_err(CallError::from)?))
    }

    /// Returns the number of blocks that can be reserved: free blocks and cached blocks.
    fn available_count(&self) -> usize {
        self.own.available_count()
    }

    /// Returns the number of blocks that requests hold.
    fn inflight_count(&self) -> usize {
        self.own.inflight_count()
    }

    /// Returns a snapshot of all metrics.
    fn export_metrics(&self) -> PyStorageMetrics {
        PyStorageMetrics(self.own.metrics())
    }
}

/// The state of a `KvStorageManager` at one moment, and its counts since it was created.
#[pyclass(frozen, name = "StorageMetrics", module = "kvcache")]
pub(crate) struct PyStorageMetrics(PoolMetrics);

#[pymethods]
impl PyStorageMetrics {
    /// The number of blocks that can be reserved.
    #[getter]
    fn available_blocks(&self) -> usize {
        self.0.available
    }

    /// The number of blocks that requests hold.
    #[getter]
    fn inflight_blocks(&self) -> usize {
        self.0.in_flight
    }

    /// The total number of blocks.
    #[getter]
    fn total_blocks(&self) -> usize {
        self.0.total
    }

    /// The share of blocks that requests hold, from 0 to 1.
    #[getter]
    fn utilization(&self) -> f64 {
        self.0.utilization
    }

    /// The number of blocks in each state: `available`, `reserved`, `in_use` and `cached`.
    #[getter]
    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let states = PyDict::new(py);
        for state in BlockState::ALL {
            states.set_item(state.name(), state.count(&self.0.counts))?;
        }
        Ok(states)
    }

    /// Compares the metrics with the targets: more than 10 % of the blocks available, less than 90 % in
    /// flight, and 99th percentiles below 1 ms for reservations and below 0.5 ms for releases. Returns, by
    /// name, `True` for a target that is met, `False` for one that is missed, and `None` if nothing was
    /// measured.
    fn goals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let goals = PyDict::new(py);
        for goal in self.0.goals() {
            goals.set_item(goal.name, goal.met)?;
        }
        Ok(goals)
    }

    /// Returns all metrics by name, with latencies in seconds.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text =
            serde_json::to_string(&self.0).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// Returns the metrics in Prometheus's text format, with `pool` as a label.
    #[pyo3(signature = (pool = "main"))]
    fn prometheus(&self, pool: &str) -> String {
        PoolMetrics::prometheus(&[(pool, &self.0)])
    }

    fn __repr__(&self) -> String {
        let PoolMetrics { available, in_flight, total, .. } = self.0;
        format!(
            "StorageMetrics(available_blocks={available}, inflight_blocks={in_flight}, total_blocks={total})"
        )
    }
}

/// The thresholds for moving blocks between tiers, from 0 to 1. They only determine how many blocks to move;
/// the caller moves them.
#[pyclass(frozen, name = "StorageTierConfig", module = "kvcache")]
pub(crate) struct PyStorageTierConfig(TierThresholds);

#[pymethods]
impl PyStorageTierConfig {
    /// Creates thresholds: the share of blocks in use above which each tier offloads, and the heat above
    /// which blocks are loaded early. Raises `KvCacheError` if a number is not between 0 and 1.
    #[new]
    #[pyo3(signature = (gpu_offload_threshold = 0.85, cpu_offload_threshold = 0.90, prefetch_threshold = 0.7))]
    fn new(
        gpu_offload_threshold: f64,
        cpu_offload_threshold: f64,
        prefetch_threshold: f64,
    ) -> PyResult<Self> {
        let thresholds =
            TierThresholds::new(gpu_offload_threshold, cpu_offload_threshold, prefetch_threshold);
        Ok(Self(thresholds.map_err(CallError::from)?))
    }

    #[getter]
    fn gpu_offload_threshold(&self) -> f64 {
        self.0.offload(Tier::Device)
    }

    #[getter]
    fn cpu_offload_threshold(&self) -> f64 {
        self.0.offload(Tier::Host)
    }

    #[getter]
    fn prefetch_threshold(&self) -> f64 {
        self.0.prefetch()
    }

    /// Returns the number of blocks to move down from a tier, `"gpu"` or `"cpu"`, that uses `used` of its
    /// `total` blocks. This is the smallest number that brings the tier down to its threshold.
    fn blocks_to_offload(&self, tier: &str, used: usize, total: usize) -> PyResult<usize> {
        let tier = match tier {
            "gpu" => Tier::Device,
            "cpu" => Tier::Host,
            _ => return Err(PyValueError::new_err(format!("unknown tier {tier:?}; use gpu or cpu"))),
        };
        Ok(self.0.blocks_to_offload(tier, used, total).map_err(CallError::from)?)
    }

    /// Returns the number of blocks, out of `wanted`, to load early to a GPU that uses `used` of its `total`
    /// blocks. `heat` is the caller's measure of how often the blocks are accessed, from 0 to 1; the number
    /// is 0 unless `heat` exceeds the prefetch threshold. Loading this number of blocks never makes the GPU
    /// offload.
    fn blocks_to_prefetch(&self, heat: f64, wanted: usize, used: usize, total: usize) -> PyResult<usize> {
        Ok(self.0.blocks_to_prefetch(heat, wanted, used, total).map_err(CallError::from)?)
    }
}
