"""Result rows: one JSON object a line, each with what it was measured on."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kernel_base.arch import Arch, arch_of_device

# Measured on the product, where that was done: (bytes/s of a device copy, bf16 FLOP/s of a large
# product). Elsewhere floors use the datasheet.
MEASURED_CEILINGS = {"sm90": (4.3e12, 7.9e14)}


def machine(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what ran."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    versions = {"python": platform.python_version()}
    for package in ("inkling-rocm", "torch", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    versions["torch"] = torch.__version__
    return {
        "device": name or "CPU",
        "arch": arch_of_device(device).name,
        "evidence": "measured",
        "versions": versions,
    }


def ceilings(arch: Arch) -> tuple[float, float, str]:
    """(bytes/s, bf16 FLOP/s, where they are from); zeros on a CPU, which has no floor."""
    if arch.name in MEASURED_CEILINGS:
        return (*MEASURED_CEILINGS[arch.name], "measured on an H200")
    return arch.hbm_bytes_per_s, arch.bf16_flops, "datasheet"


def append_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a .jsonl file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
