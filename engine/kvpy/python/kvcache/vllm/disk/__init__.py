"""Disks below vLLM: what was computed survives a restart.

For the connector, whose chunks and ordinary prompts are in its own host memory:

- ``open``: opens a rank's disk, as the settings say
- ``store``: a rank's records, and the thread that copies them
- ``epoch``: what a reset forgets
- ``asks``: the scheduler's questions to the disks of all ranks
- ``prefixes``: the questions for ordinary prompts

For vLLM's own ``OffloadingConnector``:

- ``tier``: ``SlabTier``, which vLLM loads as a secondary tier
- ``jobs``: the blocks to load or to store, and the thread that stores
- ``loads``: the thread that loads
- ``cpu``: ``CpuTieringSpec``, with which vLLM offloads on a CPU

For both:

- ``reads``: loads under way, and how long their requests wait
- ``prefill``: the time that computing takes
- ``identity``: everything that the bytes of a record depend on apart from its key
- ``settings``: the settings
- ``metrics``: the names of what is counted
"""
