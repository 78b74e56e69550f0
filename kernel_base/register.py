"""The kernel register: every Triton launcher of the project, with the cases that prove it.

A package that owns Triton kernels has a module that calls `register(KernelEntry(...))` for each
launcher and names it in the entry-point group "kernel_base.kernels" of pyproject.toml.
`inkling-rocm verify` walks the register; a test walks the source tree and fails for a `@triton.jit`
kernel that no entry names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from kernel_base.tuning import TuningRow, TuningTable

if TYPE_CHECKING:
    import torch

ENTRY_POINT_GROUP = "kernel_base.kernels"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case computed: the kernel's output, the float64 reference, and same-dtype eager error.

    Attributes:
        name: which output of the launcher this is.
        out: the kernel's output.
        reference: float64, same shape.
        eager: the same mathematics in the kernel's dtype with plain torch: its error sets the
            budget (2x).
    """

    name: str
    out: torch.Tensor
    reference: torch.Tensor
    eager: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One small problem for a launcher. `run(device)` launches the kernel there (CPU tensors under
    emulation) and returns every output; it must force `row` as the launch configuration."""

    name: str
    run: Callable[[torch.device], list[Outcome]]


@dataclass(frozen=True, kw_only=True)
class KernelEntry:
    """One launcher.

    Attributes:
        name: "package.launcher", unique, what `verify --op` selects.
        kernels: "module:function" of each `@triton.jit` kernel the launcher starts.
        table: its tuning rows.
        cases: (architecture name, row) -> problems, small but with that row's real constants:
            ragged sizes, partial tiles, head and window edges.
    """

    name: str
    kernels: tuple[str, ...]
    table: TuningTable
    cases: Callable[[str, TuningRow], Iterable[Case]]


_ENTRIES: dict[str, KernelEntry] = {}


def register(entry: KernelEntry) -> KernelEntry:
    """Add a launcher to the register.

    Raises: ValueError: the name is taken by another launcher.
    """
    if entry.name in _ENTRIES:
        raise ValueError(f"kernel entry {entry.name!r} is registered twice")
    _ENTRIES[entry.name] = entry
    return entry


def entries() -> tuple[KernelEntry, ...]:
    """All launchers of all installed packages, by name."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        import_module(point.value)
    return tuple(_ENTRIES[name] for name in sorted(_ENTRIES))
