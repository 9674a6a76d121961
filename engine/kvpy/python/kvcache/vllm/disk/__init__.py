"""A disk tier for vLLM's own ``OffloadingConnector``: the blocks of ordinary prompts survive a restart.

- ``tier``: ``SlabTier``, which vLLM loads as a secondary tier
- ``jobs``: the threads that read and write
- ``identity``: everything that a block's bytes depend on apart from its hash
- ``settings``: the tier's settings
- ``cpu``: ``CpuTieringSpec``, with which vLLM offloads on a CPU
"""
