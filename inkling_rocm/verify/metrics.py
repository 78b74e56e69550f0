"""What one kernel's compiled code and executed instructions say about it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from gcn_emulator import Counters, StaticInfo
from gcn_emulator.triton_driver import LaunchRecord
from kernel_base.arch import ARCHS

_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_LOAD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel as compiled for a tuning row, and what its launches executed.

    Attributes:
        vgprs, agprs: 32-bit registers per lane; `vgprs` is the total, accumulation included.
        spills: vector registers spilled. scratch_bytes: private memory per lane.
        lane_spills: scalar registers spilled; with no scratch they are kept in lanes of vector
            registers and cost vector instructions, no memory access.
        lane_spill_share: those instructions of the vector instructions executed.
        lds_bytes, lds_limit_bytes: of a workgroup.
        waves_per_simd: most waves of this kernel a SIMD holds, of 8.
        launches, matrix_instructions, vector_instructions: executed, over all cases of the row.
        matrix_shapes: matrix instructions by shape and type, most executed first.
        wide_load_share: part of the bytes loaded from memory that 16-byte loads brought.
        lds_conflict_factor: LDS cycles over those of conflict-free access; None = no LDS.
    """

    kernel: str
    vgprs: int
    agprs: int
    spills: int
    lane_spills: int
    lane_spill_share: float
    scratch_bytes: int
    lds_bytes: int
    lds_limit_bytes: int
    waves_per_simd: int
    launches: int
    matrix_instructions: int
    vector_instructions: int
    matrix_shapes: tuple[str, ...]
    wide_load_share: float | None
    lds_conflict_factor: float | None

    @property
    def matrix_to_vector(self) -> float:
        """Matrix instructions per vector instruction."""
        return self.matrix_instructions / max(self.vector_instructions, 1)

    def as_json(self) -> dict:
        """All fields, and the ratio."""
        return asdict(self) | {"matrix_to_vector": round(self.matrix_to_vector, 4)}


def kernel_reports(arch: str, records: list[LaunchRecord]) -> list[KernelReport]:
    """One report per compiled kernel among the launches; specialisations are listed apart."""
    groups: dict[tuple, list[LaunchRecord]] = {}
    for record in records:
        s = record.static
        key = (record.name, s.vgprs, s.agprs, s.lds, s.scratch, sum(s.instructions.values()))
        groups.setdefault(key, []).append(record)
    return [_report(arch, launches) for launches in groups.values()]


def _report(arch: str, launches: list[LaunchRecord]) -> KernelReport:
    static: StaticInfo = launches[0].static
    total = Counters(arch)
    for launch in launches:
        assert launch.counters is not None
        total.instructions.update(launch.counters.instructions)
        total.traffic.lds_cycles += launch.counters.traffic.lds_cycles
        total.traffic.lds_ideal_cycles += launch.counters.traffic.lds_ideal_cycles
    shapes = [(n, m) for m, n in total.instructions.items() if m.startswith("v_mfma")]
    cycles, ideal = total.traffic.lds_cycles, total.traffic.lds_ideal_cycles
    return KernelReport(
        kernel=launches[0].name,
        vgprs=static.vgprs,
        agprs=static.agprs,
        spills=static.vgpr_spills,
        lane_spills=static.sgpr_spills,
        lane_spill_share=round(_lane_moves(total) / max(total.valu, 1), 4),
        scratch_bytes=static.scratch,
        lds_bytes=static.lds,
        lds_limit_bytes=ARCHS[arch].lds_bytes,
        waves_per_simd=static.occupancy,
        launches=len(launches),
        matrix_instructions=total.mfma,
        vector_instructions=total.valu,
        matrix_shapes=tuple(m.removeprefix("v_mfma_") for _, m in sorted(shapes, reverse=True)),
        wide_load_share=_wide_load_share(total),
        lds_conflict_factor=round(cycles / ideal, 3) if ideal else None,
    )


def _lane_moves(counters: Counters) -> int:
    return counters.instructions["v_writelane_b32"] + counters.instructions["v_readlane_b32"]


def _wide_load_share(counters: Counters) -> float | None:
    loaded = wide = 0
    for mnemonic, count in counters.instructions.items():
        if match := _LOAD.fullmatch(mnemonic):
            size = _LOAD_BYTES.get(match[1], 2 if "short" in match[1] else 1)
            loaded += size * count
            wide += size * count * (size == 16)
    return round(wide / loaded, 3) if loaded else None
