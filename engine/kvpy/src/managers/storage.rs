//! `KvStorageManager`, its metrics, and thresholds between tiers.

use kvmanager::{BlockState, PoolMetrics, StorageManager, Tier, TierThresholds};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::CallError;
use crate::pool::{PyBlockPool, PyMutableBlocks, numbers};

/// Blocks by request: reserved in steps, released together. Holds no keys and values.
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

    /// The number of tokens in a block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The pool of the blocks, which finds blocks that were shared under their keys.
    #[getter]
    fn pool(&self) -> PyBlockPool {
        PyBlockPool(self.own.pool().clone())
    }

    /// Reserves `num_blocks` more blocks for a request, or none, and returns them. A second reservation adds
    /// to the first; the design that this method comes from loses the first. Raises `KvCacheError` if too few
    /// blocks are available: the request keeps what it had.
    fn reserve_blocks(&self, request_id: u64, num_blocks: usize) -> PyResult<Vec<u32>> {
        Ok(numbers(&self.own.reserve(request_id, num_blocks).map_err(CallError::from)?))
    }

    /// Frees all blocks of a request, and returns their number. Raises `KvCacheError` for an unknown request,
    /// which the design that this method comes from ignores.
    fn release_blocks(&self, request_id: u64) -> PyResult<usize> {
        Ok(self.own.release(request_id).map_err(CallError::from)?)
    }

    /// Returns the blocks of a request, in the order of their reservation.
    fn get_blocks(&self, request_id: u64) -> PyResult<Vec<u32>> {
        Ok(numbers(&self.own.blocks(request_id).map_err(CallError::from)?))
    }

    /// Gives the blocks of a request to the caller, who can share them under their keys: the next request
    /// finds them in `pool`. The manager forgets the request.
    fn take_blocks(&self, request_id: u64) -> PyResult<PyMutableBlocks> {
        Ok(PyMutableBlocks::new(self.own.take(request_id).map_err(CallError::from)?))
    }

    /// The number of blocks that a reservation can take: free blocks, and cached blocks.
    fn available_count(&self) -> usize {
        self.own.available_count()
    }

    /// The number of blocks that requests hold.
    fn inflight_count(&self) -> usize {
        self.own.inflight_count()
    }

    /// Returns all metrics at one moment.
    fn export_metrics(&self) -> PyStorageMetrics {
        PyStorageMetrics(self.own.metrics())
    }
}

/// The state of a `KvStorageManager` at one moment, and counts since it was created.
#[pyclass(frozen, name = "StorageMetrics", module = "kvcache")]
pub(crate) struct PyStorageMetrics(PoolMetrics);

#[pymethods]
impl PyStorageMetrics {
    /// The number of blocks that a reservation can take.
    #[getter]
    fn available_blocks(&self) -> usize {
        self.0.available
    }

    /// The number of blocks that requests hold.
    #[getter]
    fn inflight_blocks(&self) -> usize {
        self.0.in_flight
    }

    /// The number of all blocks.
    #[getter]
    fn total_blocks(&self) -> usize {
        self.0.total
    }

    /// The share of the blocks that requests hold, from 0 to 1.
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

    /// Compares the metrics with the goals: more than 10 % of the blocks available, less than 90 % in flight,
    /// reservations below 1 ms and releases below 0.5 ms (99th percentiles). Each is met, missed, or `None`
    /// if nothing was measured.
    fn goals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let goals = PyDict::new(py);
        for goal in self.0.goals() {
            goals.set_item(goal.name, goal.met)?;
        }
        Ok(goals)
    }

    /// All metrics by name, with latencies in seconds.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text =
            serde_json::to_string(&self.0).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// The metrics in the text format of Prometheus, with `pool` as a label.
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

/// The thresholds for moving blocks between tiers, from 0 to 1. They determine how many blocks to move, and
/// move nothing themselves.
#[pyclass(frozen, name = "StorageTierConfig", module = "kvcache")]
pub(crate) struct PyStorageTierConfig(TierThresholds);

#[pymethods]
impl PyStorageTierConfig {
    /// Creates thresholds: the shares of a tier's blocks above which it offloads, and the heat above which
    /// blocks are loaded early. Raises `KvCacheError` for a number outside 0 to 1.
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

    /// Returns how many blocks to move down from a tier, `"gpu"` or `"cpu"`, with `used` of `total` blocks in
    /// use: the fewest after which its threshold holds.
    fn blocks_to_offload(&self, tier: &str, used: usize, total: usize) -> PyResult<usize> {
        let tier = match tier {
            "gpu" => Tier::Device,
            "cpu" => Tier::Host,
            _ => return Err(PyValueError::new_err(format!("unknown tier {tier:?}: take gpu or cpu"))),
        };
        Ok(self.0.blocks_to_offload(tier, used, total).map_err(CallError::from)?)
    }

    /// Returns how many of `wanted` blocks to load early to a GPU with `used` of `total` blocks in use.
    /// `heat`, from 0 to 1, says how often the blocks are accessed. Never so many that the GPU would offload.
    fn blocks_to_prefetch(&self, heat: f64, wanted: usize, used: usize, total: usize) -> PyResult<usize> {
        Ok(self.0.blocks_to_prefetch(heat, wanted, used, total).map_err(CallError::from)?)
    }
}
