"""What vLLM tells its attention backends of a batch."""


class CommonAttentionMetadata:
    """Never made, because the fake model has no forward pass of torch."""
