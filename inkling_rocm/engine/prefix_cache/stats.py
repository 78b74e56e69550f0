"""Counts of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from inkling_rocm.engine.prefix_cache.tier_stats import TierStats


@dataclass(frozen=True, kw_only=True)
class TiersStats:
    """Attributes:
    loads: boundaries brought back; failed_loads: those of which an entry was lost after all, or for
        which no page was left.
    """

    loads: int
    failed_loads: int
    host: TierStats
    disk: TierStats | None


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Since the start, unless said otherwise.

    Attributes:
        lookups: sequences that began, or resumed, to be computed; hits: those that found a prefix.
        hit_tokens: tokens they did not have to compute.
        evictions: boundaries given up, by what was short: "snapshots" or a pool's name.
        boundaries, pages: held now; pages of each pool by its name, those in use by sequences too.
        snapshots: slots there are for boundaries; 0 = the cache is off.
        tiers: None without them.
    """

    lookups: int
    hits: int
    hit_tokens: int
    evictions: dict[str, int]
    boundaries: int
    pages: dict[str, int]
    snapshots: int
    tiers: TiersStats | None = None
