"""Opens a rank's records on a disk, as the connector's settings say."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvcache._native import Slab, SlabBlocks

from .epoch import Epoch
from .identity import own_identity
from .settings import check_room
from .store import DiskStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..arenas import Arenas
    from ..host import Geometry, Settings

logger = init_logger("vllm.kvcache")


def open_disk(vllm_config: VllmConfig, settings: Settings, shape: Geometry, layers: list[str], arenas: dict[bool, Arenas]) -> DiskStore:
    """Opens the records of this rank for its arenas: ``False`` is that of chunks, ``True`` that of ordinary prompts.

    Raises ``ValueError`` for a limit without room for a few records, and ``KvCacheError`` if the folder cannot be used.
    """
    assert settings.disk_path is not None
    parallel: Any = vllm_config.parallel_config
    ranks, rank = parallel.tensor_parallel_size, getattr(parallel, "rank", 0)
    sizes = [own.block_bytes for own in arenas.values()]
    largest, limit = max(sizes), settings.disk_limit // ranks
    check_room("disk_limit", settings.disk_limit, limit, largest)
    # Each replica and each rank has its own process, and a folder has one owner.
    below = [f"replica-{parallel.data_parallel_index}"] if getattr(parallel, "data_parallel_size", 1) > 1 else []
    below += [f"rank-{rank}"] if ranks > 1 else []
    folder = os.path.join(settings.disk_path, *below)
    identity = own_identity(vllm_config, layers, shape, rank, settings.disk_version)
    slab = Slab(folder, identity, limit=limit, row_bytes=min(sizes), policy=settings.disk_policy)
    blocks = {of_prefix: SlabBlocks(slab, own.arenas) for of_prefix, own in arenas.items()}
    usage = slab.usage()
    logger.info("the connector opened %s: %d records, a file of %d bytes", folder, usage["records"], usage["limit_bytes"])
    only_faster = settings.disk_loads == "if-faster"
    return DiskStore(slab, blocks, Epoch(folder, identity), deadline=settings.disk_deadline, only_faster=only_faster)
