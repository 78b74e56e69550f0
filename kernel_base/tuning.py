"""Tuning rows: which constants a kernel is launched with, where, and on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Evidence = Literal["measured", "emulated", "guess"]
Bound = int | str | bool | tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class TuningRow:
    """One launch configuration.

    Attributes:
        arch: architecture name the row is for.
        when: facts the call must have: an exact value, or an inclusive (low, high) range, None =
            unbounded.
        constexprs: `tl.constexpr` arguments (block sizes and the like), by name.
        options: launch options: num_warps, num_stages, waves_per_eu, matrix_instr_nonkdim, kpack,
            ...
        evidence: how the row was chosen: "measured" on that architecture, "emulated" (counters of
            gcn_emulator), or "guess".
        source: what stands behind it: a result id in bench/results, a report, or a reason.
        accepted_spills: why register spills are accepted in this row; None = they are not.
    """

    arch: str
    when: Mapping[str, Bound] = field(default_factory=dict)
    constexprs: Mapping[str, int | bool | str]
    options: Mapping[str, int | str]
    evidence: Evidence
    source: str
    accepted_spills: str | None = None

    def __post_init__(self):
        for name in ("when", "constexprs", "options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def matches(self, facts: Mapping[str, int | str | bool]) -> bool:
        """Whether every condition of `when` holds for `facts`; a fact the call lacks is a
        KeyError."""
        return all(_holds(bound, facts[name]) for name, bound in self.when.items())

    def launch_options(self, *, waits: bool = False) -> dict:
        """The options of a launch whose kernel `waits` for the one before (kernel_base.device), or
        does not.

        Raises: ValueError: it does not, and the option launch_pdl would have it start early."""
        if self.options.get("launch_pdl") and not waits:
            raise ValueError(
                f"tuning row {self.constexprs}: launch_pdl, but the kernel does not wait for the "
                "launch before; leave the option out"
            )
        return dict(self.options)

    def launch_kwargs(self, *, waits: bool = False) -> dict:
        """Constexprs and options together, ready for `kernel[grid](..., **row.launch_kwargs())`;
        see `launch_options`."""
        return {**self.constexprs, **self.launch_options(waits=waits)}


def _holds(bound: Bound, value) -> bool:
    if isinstance(bound, tuple):
        low, high = bound
        return (low is None or value >= low) and (high is None or value <= high)
    return value == bound


@dataclass(frozen=True)
class TuningTable:
    """Rows of one kernel in order of preference: the first row that matches wins."""

    kernel: str
    rows: tuple[TuningRow, ...]

    def select(self, arch: str, **facts: int | str | bool) -> TuningRow:
        """The row for a call on `arch` with these facts.

        Raises: ValueError: no row matches; the message names the kernel, the architecture and the
            facts.
        """
        for row in self.rows:
            if row.arch == arch and row.matches(facts):
                return row
        described = ", ".join(f"{name}={value}" for name, value in facts.items())
        there_are = ", ".join(sorted({row.arch for row in self.rows}))
        raise ValueError(
            f"{self.kernel}: no tuning row for {arch} with {described}; rows exist for {there_are}"
        )

    def for_arch(self, arch: str) -> tuple[TuningRow, ...]:
        """All rows of one architecture."""
        return tuple(row for row in self.rows if row.arch == arch)
