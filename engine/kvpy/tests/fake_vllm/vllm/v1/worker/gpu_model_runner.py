"""The class that runs the model."""


class GPUModelRunner:
    pass
