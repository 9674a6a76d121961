"""Arenas and models on devices. Tests of a missing device are skipped with the reason."""

from __future__ import annotations

import ctypes
import itertools
import os
from types import SimpleNamespace
from typing import Any

import kvcache
import numpy as np
import pytest
from kvcache.vllm import layout
from kvcache.vllm.host import UnsupportedHostError
from test_llm import MODEL, OTHER, PROMPT
from test_native import DIM, HEADS, LAYERS, ropes, turned
from test_paged import QUERY_HEADS, attention, rows

CUDA = 2  # DLPack's number


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
    """The parts of the CUDA driver that a tensor needs."""

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
    """An f32 array in GPU memory, exported through DLPack."""

    kept: dict[int, tuple[Any, ...]] = {}
    numbers = itertools.count(1)

    def __init__(self, driver: Driver, values: np.ndarray) -> None:
        self.driver, self.shape, self.streams = driver, values.shape, []
        self.bytes, self.strides = values.nbytes, [stride // values.itemsize for stride in values.strides]
        self.address = ctypes.c_uint64()
        driver.call("cuCtxSetCurrent", driver.context)
        driver.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(self.bytes))
        # The elements in memory order, for any order of the axes.
        source = self.flat(values).copy()
        driver.call("cuMemcpyHtoD_v2", self.address, source.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.bytes))

    def flat(self, values: np.ndarray) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(values, (self.bytes // 4,), (4,))

    def numpy(self) -> np.ndarray:
        values = np.empty(self.bytes // 4, np.float32)
        self.driver.call("cuCtxSetCurrent", self.driver.context)
        self.driver.call("cuMemcpyDtoH_v2", values.ctypes.data_as(ctypes.c_void_p), self.address, ctypes.c_size_t(self.bytes))
        return np.lib.stride_tricks.as_strided(values, self.shape, [4 * stride for stride in self.strides])

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.streams.append(stream)
        shape, strides = ((ctypes.c_int64 * len(self.shape))(*values) for values in (self.shape, self.strides))
        number = next(self.numbers)
        deleter = DELETER(lambda _: self.kept.pop(number) and None)
        tensor = DLTensor(self.address.value, Device(CUDA, 0), len(self.shape), DataType(2, 32, 1), shape, strides, 0)
        managed = Managed(tensor, None, deleter)
        self.kept[number] = (managed, (shape, strides), deleter, self)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(managed), b"dltensor", None)


def cuda_arena(memory: str = "device") -> kvcache.Arena:
    try:
        return kvcache.Arena(
            num_layers=LAYERS,
            num_blocks=8,
            block_size=16,
            num_heads=HEADS,
            head_dim=DIM,
            dtype_name="float32",
            device="cuda",
            memory=memory,
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
    # Producers get the stream that works on their tensors.
    assert all(stream not in (None, 0, -1) for array in (keys, queries, out) for stream in array.streams)
    for array in (keys, values, queries, out, *back):
        assert not any(held[3] is array for held in DeviceArray.kept.values()), "a tensor is still held"
    own.rotate([(table.block_ids[0], 6)], ropes(), 3)
    with pytest.raises(ValueError, match="is on cpu, but must be on cuda:0"):
        own.scatter(1, k, v, range(37))
    with pytest.raises(kvcache.KvCacheError, match="on cpu"):
        host = [np.zeros((3, HEADS, 32, 2 * DIM), np.float32) for _ in range(LAYERS)]
        own.save(kvcache.ForeignCache.interleaved(host, "columns"), [0], [0])
    with pytest.raises(ValueError, match="is on cuda:0, but must be on cpu"):
        kvcache.ForeignCache.interleaved([keys], "columns")


def on_host(driver: Driver, tensor: kvcache.Tensor) -> np.ndarray:
    """Returns a copy of one of this module's f32 tensors in GPU memory."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = tensor.__dlpack__()
    found = Managed.from_address(pointer(capsule, b"dltensor")).tensor
    assert (found.device.kind, found.device.number) == tensor.__dlpack_device__() == (CUDA, 0)
    shape, strides = (tuple(axes[: found.ndim]) for axes in (found.shape, found.strides))
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    values = np.empty(reach, np.float32)
    driver.call("cuCtxSetCurrent", driver.context)
    start = ctypes.c_uint64(found.data + found.byte_offset)
    driver.call("cuMemcpyDtoH_v2", values.ctypes.data_as(ctypes.c_void_p), start, ctypes.c_size_t(values.nbytes))
    return np.lib.stride_tricks.as_strided(values, shape, [4 * stride for stride in strides])


def test_managers_keep_keys_and_values_on_a_gpu() -> None:
    cuda_arena()
    driver = Driver()
    k, v = (rows(5, seed).transpose(1, 0, 2).copy() for seed in (1, 2))
    blocks = kvcache.BlockManager(1, HEADS, DIM, 16, 4, device="cuda")
    (block,) = blocks.allocate_blocks(1)
    blocks.write_kv(0, block, 2, DeviceArray(driver, k), DeviceArray(driver, v))
    for read, written in zip(blocks.read_kv(0, [block], 7), (k, v)):
        assert np.array_equal(on_host(driver, read)[:, 2:], written)
    with pytest.raises(ValueError, match="is on cpu, but must be on cuda:0"):
        blocks.write_kv(0, block, 0, k, v)
    sequences = kvcache.PagedKVCache(blocks)
    seq = sequences.create_sequence()
    # Tensors of this module go from one manager to another on the GPU.
    sequences.append_kv(seq, 0, *blocks.read_kv(0, [block], 7))
    assert np.array_equal(on_host(driver, sequences.get_kv(seq, 0)[1])[:, 2:], v)
    merged = kvcache.KVCache(1, HEADS, 8, DIM, num_layers=2, device="cuda")
    merged.merge_from_ranks([DeviceArray(driver, x[None]) for x in (k, v)])
    assert np.array_equal(on_host(driver, merged.get_data())[:, 0], np.stack([k, v]))


def strided(layer: np.ndarray, order: str) -> np.ndarray:
    """Returns a layer whose axes (blocks, heads, tokens, elements) have another order in memory."""
    axes = ["BHNC".index(axis) for axis in order]
    back = [axes.index(axis) for axis in range(4)]
    return layer.transpose(axes).copy().transpose(back)


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
@pytest.mark.parametrize("distance", [0, 700, -5])
def test_rows_go_to_and_from_an_engines_cache_on_a_gpu(order: str, distance: int) -> None:
    """Rows with a key and a value, like FlashAttention's and FlashInfer's in vLLM, match a cache on the
    host.
    """
    own, driver = cuda_arena("host"), Driver()
    drawn = np.random.default_rng(0).standard_normal((LAYERS, 3, HEADS, 16, 2 * DIM), dtype=np.float32)
    layers = [strided(layer, order) for layer in drawn]
    theirs = [DeviceArray(driver, layer) for layer in layers]
    on_host = [strided(layer, order) for layer in drawn]
    pairs = [
        (own, kvcache.ForeignCache.interleaved(theirs, "rows", "cuda")),
        (host_arena(), kvcache.ForeignCache.interleaved(on_host, "rows")),
    ]
    for arena, cache in pairs:
        arena.save(cache, [20, 21, 22], [5, 6, 17])
        arena.load(cache, [([20, 21, 22], [40, -1, 41], distance)], ropes())
    for layer, (device, host) in enumerate(zip(theirs, on_host)):
        got = device.numpy()
        assert np.allclose(got, host, atol=1e-5)
        for slot, read in ((5, 40), (17, 41)):
            before = drawn[layer][slot // 16, :, slot % 16]
            assert np.allclose(got[2, :, read % 16, :DIM], turned(before[:, :DIM], layer, distance), atol=1e-5)
            assert np.array_equal(got[2, :, read % 16, DIM:], before[:, DIM:])
        changed = np.argwhere((got != drawn[layer]).any(-1))
        assert {(int(block), int(token)) for block, _, token in changed} == {(2, 8), (2, 9)}, "other rows were written"
    with pytest.raises(ValueError, match="use rows"):
        kvcache.ForeignCache.interleaved(theirs, "columns", "cuda")
    # Keep this object: a deleter written in Python cannot run while an exception is raised.
    one = kvcache.ForeignCache.interleaved(theirs[:1], "rows", "cuda")
    with pytest.raises(kvcache.KvCacheError, match="layers of the cache"):
        own.load(one, [([0], [0], 0)], ropes())
    with pytest.raises(kvcache.KvCacheError, match="out of range"):
        own.load(pairs[0][1], [([0], [48], 0)], ropes())


class SharedArray(DeviceArray):
    """Blocks of another array, in the same device memory."""

    def __init__(self, of: DeviceArray, first: int, blocks: int) -> None:
        self.of, self.driver, self.bytes, self.strides, self.streams = of, of.driver, of.bytes, of.strides, []
        self.shape = (blocks, *of.shape[1:])
        self.address = ctypes.c_uint64(of.address.value + 4 * first)


def test_layers_over_one_memory_are_refused_on_a_gpu() -> None:
    cuda_arena()
    driver = Driver()
    drawn = np.zeros((3, HEADS, 16, 2 * DIM), np.float32)
    first, second = DeviceArray(driver, drawn), DeviceArray(driver, drawn)
    block, row = HEADS * 16 * 2 * DIM, 2 * DIM
    for layers in (
        [first, first],
        [first, second, SharedArray(first, 0, 3)],
        [SharedArray(first, 0, 2), SharedArray(first, block, 2)],
        [SharedArray(second, 0, 2), SharedArray(second, row, 2)],
        [SharedArray(second, 0, 2), SharedArray(second, DIM, 2)],
    ):
        with pytest.raises(kvcache.KvCacheError, match="operands share memory"):
            kvcache.ForeignCache.interleaved(layers, "rows", "cuda")
    kept = kvcache.ForeignCache.interleaved([first, second], "rows", "cuda")
    apart = kvcache.ForeignCache.interleaved([SharedArray(first, 0, 1), SharedArray(first, block, 1)], "rows", "cuda")
    del kept, apart


def test_the_connector_knows_layouts_of_gpus_by_their_backends() -> None:
    cuda_arena()
    driver = Driver()
    caches = {f"layer.{i}": DeviceArray(driver, np.zeros((3, HEADS, 16, 2 * DIM), np.float32)) for i in range(LAYERS)}
    for cache in caches.values():
        cache.device = SimpleNamespace(type="cuda", index=0)  # type: ignore[attr-defined]

    def described(*backends: str) -> str:
        modules = {
            name: SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda backend=backend: backend))
            for name, backend in zip(caches, backends)
        }
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=modules))
        return layout.foreign_cache(config, list(caches), caches)[1]  # type: ignore[arg-type]

    assert described("FLASH_ATTN", "FLASH_ATTN") == described("FLASHINFER", "TRITON_ATTN") == "rows"
    with pytest.raises(UnsupportedHostError, match=r"vLLM .* lays out its caches for FLASH_ATTN, MAMBA"):
        described("FLASH_ATTN", "MAMBA")
    elsewhere = SimpleNamespace(device=SimpleNamespace(type="tpu", index=0))
    with pytest.raises(UnsupportedHostError, match="'tpu'"):
        layout.device_of(elsewhere)  # type: ignore[arg-type]


def host_arena(num_blocks: int = 8) -> kvcache.Arena:
    return kvcache.Arena(
        num_layers=LAYERS, num_blocks=num_blocks, block_size=16, num_heads=HEADS, head_dim=DIM, dtype_name="float32"
    )


class Npu:
    """The parts of CANN's runtime that a tensor needs."""

    HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
    IS_INITIALISED = 100002

    def __init__(self) -> None:
        folder = os.environ.get("KV_ASCEND_LIB_DIR")
        try:
            self.library = ctypes.CDLL(os.path.join(folder, "libascendcl.so") if folder else "libascendcl.so")
        except OSError as error:
            pytest.skip(f"SKIPPED: {error}")
        assert self.library.aclInit(None) in (0, self.IS_INITIALISED)

    def call(self, name: str, *args: Any) -> None:
        assert self.library.aclrtSetDevice(0) == 0
        code = getattr(self.library, name)(*args)
        assert code == 0, f"{name} returned {code}"


class NpuTensor:
    """A contiguous f32 tensor in NPU memory, with the attributes of a torch tensor that the connector reads.
    """

    dtype = "torch.float32"
    device = SimpleNamespace(type="npu", index=0)
    contiguous = True

    def __init__(self, npu: Npu, values: np.ndarray) -> None:
        self.npu, self.shape, self.bytes = npu, values.shape, values.nbytes
        self.address, source = ctypes.c_void_p(), np.ascontiguousarray(values)
        npu.call("aclrtMalloc", ctypes.byref(self.address), ctypes.c_size_t(self.bytes), 0)
        self.copy(self.address, source.ctypes.data_as(ctypes.c_void_p), Npu.HOST_TO_DEVICE)

    def copy(self, to: ctypes.c_void_p, source: ctypes.c_void_p, kind: int) -> None:
        size = ctypes.c_size_t(self.bytes)
        self.npu.call("aclrtMemcpy", to, size, source, size, kind)

    def numpy(self) -> np.ndarray:
        values = np.empty(self.shape, np.float32)
        self.copy(values.ctypes.data_as(ctypes.c_void_p), self.address, Npu.DEVICE_TO_HOST)
        return values

    def data_ptr(self) -> int:
        assert self.address.value is not None
        return self.address.value

    def is_contiguous(self) -> bool:
        return self.contiguous


def described_npu(layers: list[tuple[NpuTensor, ...]], *backends: str) -> tuple[kvcache.ForeignCache, str]:
    """Describes caches like the connector does, for layers of the given attention classes."""
    names = [f"layer.{i}" for i in range(len(layers))]
    modules = {name: SimpleNamespace(attn_backend=type(backend, (), {})) for name, backend in zip(names, backends)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=modules))
    try:
        return layout.foreign_cache(config, names, dict(zip(names, layers)))  # type: ignore[arg-type]
    except kvcache.KvCacheError as error:
        pytest.skip(f"SKIPPED: {error}")


NPU_BLOCKS, NPU_BLOCK_SIZE = 3, 128


def npu_layers(npu: Npu, drawn: np.ndarray) -> list[tuple[NpuTensor, ...]]:
    return [(NpuTensor(npu, keys), NpuTensor(npu, values)) for keys, values in drawn]


@pytest.mark.parametrize("distance", [0, 700, -5])
def test_rows_go_to_and_from_an_engines_cache_on_an_npu(distance: int) -> None:
    """Copies more rows than fit in one copy, with rotated keys, into caches with vllm-ascend's layout."""
    npu, count = Npu(), 300
    drawn = np.random.default_rng(0).standard_normal(
        (LAYERS, 2, NPU_BLOCKS, NPU_BLOCK_SIZE, HEADS, DIM), dtype=np.float32
    )
    theirs = npu_layers(npu, drawn)
    cache, order = described_npu(theirs, *["AscendAttentionBackend"] * LAYERS)
    assert order == "planes"
    assert (layout.device_of(theirs[0]), layout.block_size_of(theirs[0])) == ("ascend:0", NPU_BLOCK_SIZE)  # type: ignore[arg-type]
    own = host_arena(20)
    assert layout.arena_device("ascend:0") == "cpu"
    # In reverse, to notice a wrong order. The last row is skipped.
    rows, read = list(range(count)), list(range(20 + count, 20, -1))
    written = [*range(NPU_BLOCKS * NPU_BLOCK_SIZE - count, NPU_BLOCKS * NPU_BLOCK_SIZE - 1), -1]
    own.save(cache, rows, read)
    own.load(cache, [(rows, written, distance)], ropes())
    for layer, (keys, values) in enumerate(theirs):
        before = [plane.reshape(-1, HEADS, DIM) for plane in drawn[layer]]
        after = [tensor.numpy().reshape(-1, HEADS, DIM) for tensor in (keys, values)]
        moved = np.stack([turned(row, layer, distance) for row in before[0][read[:-1]]])
        assert np.allclose(after[0][written[:-1]], moved, atol=1e-5)
        assert np.array_equal(after[1][written[:-1]], before[1][read[:-1]])
        rest = [*range(NPU_BLOCKS * NPU_BLOCK_SIZE - count), NPU_BLOCKS * NPU_BLOCK_SIZE - 1]
        assert all(np.array_equal(x[rest], y[rest]) for x, y in zip(after, before)), "other rows were written"
    with pytest.raises(kvcache.KvCacheError, match="out of range"):
        own.load(cache, [([0], [NPU_BLOCKS * NPU_BLOCK_SIZE], 0)], ropes())
    with pytest.raises(kvcache.KvCacheError, match="twice"):
        own.load(cache, [([0, 1], [5, 5], 0)], ropes())
    with pytest.raises(kvcache.KvCacheError, match="slots to write"):
        own.save(cache, [0], [0, 1])
    with pytest.raises(kvcache.KvCacheError):
        own.load(cache, [([0], [5], 10**9)], ropes())
    small = kvcache.Arena(
        num_layers=LAYERS, num_blocks=1, block_size=16, num_heads=HEADS, head_dim=DIM, dtype_name="float16"
    )
    with pytest.raises(kvcache.KvCacheError, match="arena"):
        small.save(cache, [0], [0])
    # Rejected copies must change nothing and not block later ones.
    own.save(cache, [0], [0])
    own.load(cache, [([0], [1], 0)], ropes())
    assert np.array_equal(theirs[0][1].numpy()[0, 1], drawn[0][1][0, 0])


def test_layouts_of_npus_are_known_by_their_classes() -> None:
    npu = Npu()
    theirs = npu_layers(npu, np.zeros((LAYERS, 2, NPU_BLOCKS, NPU_BLOCK_SIZE, HEADS, DIM), np.float32))
    known = ["AscendAttentionBackend"] * LAYERS
    with pytest.raises(UnsupportedHostError, match=r"vLLM .* lays out its caches for .*AscendMLABackend"):
        described_npu(theirs, "AscendMLABackend", *known[1:])
    with pytest.raises(UnsupportedHostError, match="1 planes of 1 layers"):
        described_npu([theirs[0][:1]], *known[:1])
    theirs[0][0].contiguous = False
    with pytest.raises(UnsupportedHostError, match="gaps"):
        described_npu(theirs, *known)
    places = [(theirs[0][0].data_ptr(), theirs[0][0].data_ptr() + 64)]
    shape: Any = dict(num_blocks=1, block_size=16, num_heads=HEADS, head_dim=DIM, dtype_name="float32")
    with pytest.raises(kvcache.KvCacheError, match="share memory"):
        kvcache.ForeignCache.lent(places, theirs, **shape)
    with pytest.raises(ValueError, match='unknown device "cuda"'):
        kvcache.ForeignCache.lent([], theirs, **shape, device="cuda")


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
