"""The memory that hits came from."""

from enum import Enum


class CacheHitSource(str, Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
