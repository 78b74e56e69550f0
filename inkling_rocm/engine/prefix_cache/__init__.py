"""Reuse of what earlier sequences have computed of a prompt; see docs/prefix_cache.md."""

from inkling_rocm.engine.prefix_cache.cache import Capture, PrefixCache
from inkling_rocm.engine.prefix_cache.stats import CacheStats

__all__ = ["CacheStats", "Capture", "PrefixCache"]
