"""The source of cache hits."""

from enum import Enum


class CacheHitSource(str, Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
