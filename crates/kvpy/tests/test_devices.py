"""Arenas and models on devices. Tests of a device that is not here are skipped, and say why."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import kvcache
import numpy as np
import pytest
from test_llm import MODEL, OTHER, PROMPT
from test_native import DIM, HEADS, LAYERS, ropes
from test_paged import QUERY_HEADS, attention, rows

CUDA = 2  # as DLPack numbers devices


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    pass


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Driver:
    """The CUDA driver, as far as a tensor needs it."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.library, name)(*args)
        assert code == 0, f"{name} returned {code}"


class DeviceArray:
    """An array of f32 in the memory of a GPU, which other libraries take through DLPack."""

    kept: dict[int, tuple[Any, ...]] = {}
    numbers = itertools.count(1)

    def __init__(self, driver: Driver, values: np.ndarray) -> None:
        self.driver, self.shape, self.streams = driver, values.shape, []
        self.bytes = values.nbytes
        self.address = ctypes.c_uint64()
        driver.call("cuCtxSetCurrent", driver.context)
        driver.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(self.bytes))
        source = np.ascontiguousarray(values)
        driver.call("cuMemcpyHtoD_v2", self.address, source.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.bytes))

    def numpy(self) -> np.ndarray:
        values = np.empty(self.shape, np.float32)
        self.driver.call("cuCtxSetCurrent", self.driver.context)
        self.driver.call("cuMemcpyDtoH_v2", values.ctypes.data_as(ctypes.c_void_p), self.address, ctypes.c_size_t(self.bytes))
        return values

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.streams.append(stream)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        number = next(self.numbers)
        deleter = DELETER(lambda _: self.kept.pop(number) and None)
        tensor = DLTensor(self.address.value, Device(CUDA, 0), len(self.shape), DataType(2, 32, 1), shape, None, 0)
        managed = Managed(tensor, None, deleter)
        self.kept[number] = (managed, shape, deleter, self)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(managed), b"dltensor", None)


def cuda_arena() -> kvcache.Arena:
    try:
        return kvcache.Arena(
            num_layers=LAYERS,
            num_blocks=8,
            block_size=16,
            num_heads=HEADS,
            head_dim=DIM,
            dtype_name="float32",
            device="cuda",
        )
    except kvcache.KvCacheError as error:
        pytest.skip(f"SKIPPED: {error}")


def test_operations_on_a_gpu_take_tensors_of_the_gpu() -> None:
    own, driver = cuda_arena(), Driver()
    pool = kvcache.BlockPool(8)
    table = kvcache.BlockTable(pool, 16)
    k, v, q = rows(37, 1), rows(37, 2), rows(5, 3, QUERY_HEADS)
    keys, values, queries = (DeviceArray(driver, x) for x in (k, v, q))
    own.scatter(1, keys, values, table.grow(37))
    back = [DeviceArray(driver, np.zeros_like(k)) for _ in range(2)]
    own.gather(1, table.slots(0, 37), *back)
    assert np.array_equal(back[0].numpy(), k) and np.array_equal(back[1].numpy(), v)
    out = DeviceArray(driver, np.zeros_like(q))
    own.attend(1, queries, kvcache.AttendWork([(5, [table.segment()])]), out)
    visible = np.arange(37)[None] <= np.arange(32, 37)[:, None]
    assert np.allclose(out.numpy(), attention(q, k, v, visible), atol=1e-4)
    # Producers are told of the stream that works on their tensors.
    assert all(stream not in (None, 0, -1) for array in (keys, queries, out) for stream in array.streams)
    for array in (keys, values, queries, out, *back):
        assert not any(held[3] is array for held in DeviceArray.kept.values()), "a tensor is still held"
    own.rotate([(table.block_ids[0], 6)], ropes(), 3)
    with pytest.raises(ValueError, match="lies on cpu, not on cuda:0"):
        own.scatter(1, k, v, range(37))
    with pytest.raises(ValueError, match="host memory"):
        host = [np.zeros((3, HEADS, 32, 2 * DIM), np.float32) for _ in range(LAYERS)]
        own.save(kvcache.ForeignCache.interleaved(host, "columns"), [0], [0])
    with pytest.raises(ValueError, match="lies on cuda:0, not on cpu"):
        kvcache.ForeignCache.interleaved([keys], "columns")


@pytest.mark.parametrize("device", ["cuda", "ascend"])
def test_a_model_answers_on_a_device(device: str) -> None:
    try:
        llm = kvcache.LLM(MODEL, device=device, recompute="none")
    except kvcache.KvCacheError as error:
        pytest.skip(f"SKIPPED: {error}")
    (first,), (second,) = llm.generate(PROMPT), llm.generate(OTHER)
    assert (first.text.strip(), second.text.strip()) == ("blue", "red")
    assert llm.get_chunk_cache_stats().hit_count == 2


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:1", ""])
def test_unknown_devices_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="unknown device"):
        kvcache.Arena(
            num_layers=1, num_blocks=1, block_size=16, num_heads=1, head_dim=32, dtype_name="float32", device=name
        )
    with pytest.raises(ValueError, match="unknown device"):
        kvcache.LLM(MODEL, device=name)
