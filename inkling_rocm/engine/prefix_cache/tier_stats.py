"""What a tier counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class TierStats:
    """Attributes:
    entries, bytes: held now; bytes are those of the data (host) or of the files (disk).
    hits, misses: of `get`; a prefetch counts only in the tier it reads from.
    evictions: entries given up for room.
    dropped: entries that were not kept: larger than the tier, or (host) evicted before the disk
        had taken them.
    corrupt: files that were not what their name said, and were removed.
    errors: entries not written or not read because the system said no (a full disk, ...).
    bytes_in, bytes_out: moved by puts and hits.
    """

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    dropped: int = 0
    corrupt: int = 0
    errors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
