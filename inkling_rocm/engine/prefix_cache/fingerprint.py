"""What must agree before one process may use K/V that another wrote."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StateFingerprint:
    """Attributes:
    model: the resolved config (overrides applied), as text.
    weights: `weights_identity` of the checkpoint, or how dummy weights were made.
    variants: what else decides the bits of K/V: the chosen op variants, the program's version.
    page_size: tokens of a page. ring_rows: rows of a convolution ring.
    lookahead: tokens after a page that its draft K/V depends on.
    tp_rank, tp_size: whose share of the heads the K/V is.
    """

    model: str
    weights: str
    variants: str
    dtype: str
    page_size: int
    ring_rows: int
    lookahead: int
    tp_rank: int
    tp_size: int

    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


def weights_identity(folder: Path) -> str:
    """Of a checkpoint folder: names, sizes and modification times of its safetensors files.

    Reading all weights would take minutes; a copied checkpoint merely misses what the original
    stored.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        status = file.stat()
        name = str(file.relative_to(folder))
        digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()
