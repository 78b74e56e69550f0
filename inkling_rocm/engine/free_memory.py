"""How much memory can still be had."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 1 << 30
MEMINFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the GPU, or of the machine and its control group.

    Raises: ValueError: this platform does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, of_group = _machine_free(MEMINFO), _group_free(CONTROL_GROUP)
    return max(free if of_group is None else min(free, of_group), 0)


def _machine_free(meminfo: Path) -> int:
    """Linux says what is available; elsewhere (macOS) all physical memory counts."""
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError) as error:
        raise ValueError("this platform does not tell how much memory it has") from error


def _group_free(folder: Path) -> int | None:
    """What the control group may still take; None without a limit. Cached file pages (of a
    checkpoint just read, above all) are charged to it but given up when memory is wanted."""
    limit = folder / "memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return None
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = int(stat["active_file"]) + int(stat["inactive_file"])
    return int(most) - (int((folder / "memory.current").read_text()) - cached)
