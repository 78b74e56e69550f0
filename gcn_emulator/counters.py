"""Dynamic counters (instructions, MFMA work, LDS conflicts, bytes) and static metadata."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from gcn_emulator.formats import U64
from gcn_emulator.parser import Program

LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
LDS_GRANULE = {"gfx942": 512, "gfx950": 1280}
SIMDS_PER_CU = 4
MAX_WAVES_PER_SIMD = 8
UNIFIED_VGPRS = 512


@dataclass
class Traffic:
    """Bytes moved and LDS bank conflicts."""

    arch: str
    load_bytes: int = 0
    store_bytes: int = 0
    load_lines: int = 0
    store_lines: int = 0
    lds_bytes: int = 0
    lds_cycles: int = 0
    lds_ideal_cycles: int = 0

    def global_access(self, address: np.ndarray, size: int, is_load: bool) -> None:
        """Count one vector memory instruction: bytes and distinct 128-byte lines."""
        if not len(address):
            return
        touched = np.concatenate([address >> U64(7), (address + U64(size - 1)) >> U64(7)])
        lines = len(np.unique(touched))
        if is_load:
            self.load_bytes += len(address) * size
            self.load_lines += lines
        else:
            self.store_bytes += len(address) * size
            self.store_lines += lines

    def lds(self, address: np.ndarray, size: int) -> None:
        """Bank-conflict model: lanes are served in groups that could fill all banks once."""
        banks = 64 if self.arch == "gfx950" else 32
        words = max(size // 4, 1)
        group = max(1, min(64, banks // words))
        self.lds_bytes += len(address) * size
        for start in range(0, len(address), group):
            part = address[start : start + group, None] // 4 + np.arange(words)
            self.lds_cycles += int(np.bincount(np.unique(part) % banks).max())
            self.lds_ideal_cycles += 1


@dataclass
class Counters:
    """What one or more launches executed."""

    arch: str
    instructions: Counter[str] = field(default_factory=Counter)
    mfma_flops: int = 0
    waves: int = 0
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.arch)

    def add_hits(self, program: Program, hits: list[int]) -> None:
        """Merge per-instruction execution counts."""
        for inst, count in zip(program.instructions, hits, strict=True):
            if count:
                self.instructions[inst.mnemonic] += count
                self.mfma_flops += count * mfma_flops(inst.mnemonic)

    def total(self, *prefixes: str) -> int:
        """Executed instructions whose mnemonic starts with one of the prefixes."""
        return sum(n for m, n in self.instructions.items() if m.startswith(prefixes))

    @property
    def mfma(self) -> int:
        """Matrix instructions executed (per wave)."""
        return self.total("v_mfma")

    @property
    def valu(self) -> int:
        """Vector ALU instructions executed, matrix instructions excluded."""
        return self.total("v_") - self.mfma

    @property
    def lds_conflict_cycles(self) -> int:
        """LDS cycles beyond the conflict-free count."""
        return self.traffic.lds_cycles - self.traffic.lds_ideal_cycles


def mfma_flops(mnemonic: str) -> int:
    """Floating-point (or integer) operations of one matrix instruction."""
    match = re.match(r"v_mfma_(?:scale_)?\w+?_(\d+)x(\d+)x(\d+)_(?:(\d+)b_)?", mnemonic)
    if not match:
        return 0
    m, n, k = (int(match[i]) for i in (1, 2, 3))
    return 2 * m * n * k * int(match[4] or 1)


@dataclass(frozen=True)
class StaticInfo:
    """Resources of a compiled kernel. `lds` includes Triton's dynamic shared memory."""

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    occupancy: int
    instructions: Counter[str]

    @property
    def fits(self) -> bool:
        """Whether the kernel can launch at all (LDS overflow is not a compile error)."""
        return self.occupancy > 0


def static_info(program: Program, arch: str, shared: int, num_warps: int) -> StaticInfo:
    """Read the metadata and derive the occupancy in waves per SIMD."""
    meta = program.metadata
    vgprs, sgprs = meta.get("vgpr_count", 0), meta.get("sgpr_count", 0)
    lds = meta.get("group_segment_fixed_size", 0) + shared
    by_vgpr = UNIFIED_VGPRS // max(-(-vgprs // 8) * 8, 8)
    by_sgpr = 8 if sgprs <= 100 else 7
    granule = LDS_GRANULE[arch]
    groups = LDS_BYTES[arch] // (-(-lds // granule) * granule) if lds else 64
    by_lds = groups * num_warps // SIMDS_PER_CU if groups * num_warps >= SIMDS_PER_CU else groups
    if by_vgpr * SIMDS_PER_CU < num_warps:
        by_vgpr = 0
    return StaticInfo(
        vgprs=vgprs,
        agprs=meta.get("agpr_count", 0),
        sgprs=sgprs,
        vgpr_spills=meta.get("vgpr_spill_count", 0),
        sgpr_spills=meta.get("sgpr_spill_count", 0),
        scratch=meta.get("private_segment_fixed_size", 0),
        lds=lds,
        occupancy=min(MAX_WAVES_PER_SIMD, by_vgpr, by_sgpr, by_lds),
        instructions=Counter(i.mnemonic for i in program.instructions),
    )
