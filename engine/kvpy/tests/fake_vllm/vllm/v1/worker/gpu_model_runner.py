"""The class of what runs the model."""


class GPUModelRunner:
    pass
