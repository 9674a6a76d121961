"""The class of schedulers."""


class SchedulerInterface:
    pass
