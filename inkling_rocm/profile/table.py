"""One table for every profiler: a row an op, launches, time, bytes, fraction of the ceiling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(kw_only=True)
class OpRow:
    """What the window spent in one op, over all layers and steps.

    Attributes:
        calls: of the op; 0 for kernels that no op's range holds (attributed by name, or not).
        launches: kernels on a GPU, innermost torch operations on a CPU.
        us: time on the device (GPU), or in the call (CPU).
        bytes: the least that the calls must move (profile/traffic.py).
    """

    op: str
    calls: int = 0
    launches: int = 0
    us: float = 0.0
    bytes: int = 0

    def fraction(self, bytes_per_s: float) -> float | None:
        """Least time over measured time; None where one of them is unknown."""
        if not (self.bytes and self.us and bytes_per_s):
            return None
        return self.bytes / bytes_per_s / (self.us * 1e-6)


@dataclass(kw_only=True)
class Profile:
    """A window of steps.

    Attributes:
        bytes_per_s: the ceiling; ceiling: where that number is from.
        wall_us: host time of the window.
    """

    rows: list[OpRow]
    steps: int
    wall_us: float
    profiler: str
    device: str
    bytes_per_s: float
    ceiling: str

    def as_json(self) -> dict[str, Any]:
        """Everything, with each row's fraction of the ceiling."""
        facts = {k: v for k, v in asdict(self).items() if k != "rows"}
        rows = [{**asdict(r), "fraction": r.fraction(self.bytes_per_s)} for r in self.rows]
        return {**facts, "rows": rows}

    def as_text(self) -> str:
        """A table, the most expensive op first."""
        steps = max(self.steps, 1)
        total = sum(row.us for row in self.rows)
        lines = [
            f"{self.device}, {self.profiler}: {self.steps} steps, {self.wall_us / steps:.0f} us a "
            f"step on the host, {total / steps:.0f} us in the ops below",
            f"{'op':<34} {'calls':>6} {'launches':>8} {'us/step':>10} {'share':>6} "
            f"{'MB/step':>9} {'of ceiling':>10}",
        ]
        for row in sorted(self.rows, key=lambda r: -r.us):
            fraction = row.fraction(self.bytes_per_s)
            shown = "-" if fraction is None else f"{fraction:.0%}"
            lines.append(
                f"{row.op:<34} {row.calls / steps:>6.1f} {row.launches / steps:>8.1f} "
                f"{row.us / steps:>10.1f} {row.us / total if total else 0:>6.1%} "
                f"{row.bytes / steps / 1e6:>9.3f} {shown:>10}"
            )
        if self.bytes_per_s:
            lines.append(f"ceiling: {self.bytes_per_s / 1e12:.2f} TB/s, {self.ceiling}")
        return "\n".join(lines)


def merged(rows: Iterable[OpRow]) -> list[OpRow]:
    """Rows of the same op added up, in the order of first appearance."""
    found: dict[str, OpRow] = {}
    for row in rows:
        into = found.setdefault(row.op, OpRow(op=row.op))
        into.calls += row.calls
        into.launches += row.launches
        into.us += row.us
        into.bytes += row.bytes
    return list(found.values())


def op_of_kernel(name: str) -> str:
    """The launcher of the kernel register that owns a kernel, by the kernel's name; else what kind
    of library kernel it is. For kernels outside every op's range: graph replays, the sampler."""
    from kernel_base.register import entries

    bare = name.split("(")[0].removesuffix(".kd").strip()
    for entry in entries():
        if any(bare == path.rpartition(":")[2] for path in entry.kernels):
            return entry.name
    lowered = bare.lower()
    if any(word in lowered for word in ("cijk_", "gemm", "gemv", "cutlass", "nvjet", "splitk")):
        return "library: matrix product"
    return "library: other"
