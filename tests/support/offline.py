"""Compile what a launcher would launch, for any target, without running it; read spills, LDS and
instructions."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the compiled code of one kernel says.

    Attributes: spills: registers and scratch bytes (AMD), bytes of local memory (NVIDIA).
    lds_bytes: static and dynamic LDS. matrix: matrix instructions. wide_loads: global loads of 16
        bytes, and bulk copies. atomics: global atomics.
    """

    name: str
    spills: int
    registers: int
    lds_bytes: int
    matrix: int
    wide_loads: int
    atomics: int


def facts(kernel: CompiledKernel) -> Facts:
    """Read the assembly (AMD) or the PTX and the binary's resource usage (NVIDIA)."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        found = {
            key: int(value)
            for key, value in re.findall(
                r"\.(\w+_spill_count|vgpr_count|private_segment_fixed_size):\s+(\d+)", text
            )
        }
        spills = (
            found["vgpr_spill_count"]
            + found["sgpr_spill_count"]
            + found["private_segment_fixed_size"]
        )
        matrix = len(re.findall(r"\bv_mfma_", text))
        wide = len(re.findall(r"\b(?:buffer_load|global_load|global_load_lds)_dwordx4", text))
        atomics = len(re.findall(r"\b(?:buffer|global|flat)_atomic_", text))
        registers = found["vgpr_count"]
    else:
        text = kernel.asm["ptx"]
        used = {
            key: int(value)
            for key, value in re.findall(
                r"(REG|STACK|LOCAL):(\d+)", _resource_usage(kernel.asm["cubin"])
            )
        }
        spills, registers = used["STACK"] + used["LOCAL"], used["REG"]
        matrix = len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", text))
        wide = len(
            re.findall(
                r"cp\.async\.cg\.shared\.global.*?0x10|ld\.global\S*\.v4\.b32|cp\.async\.bulk\.tensor",
                text,
            )
        )
        atomics = len(re.findall(r"\batom\.", text))
    return Facts(
        name=kernel.metadata.name, spills=spills, registers=registers,
        lds_bytes=kernel.metadata.shared,
        matrix=matrix, wide_loads=wide, atomics=atomics,
    )  # fmt: skip


def _resource_usage(cubin: bytes) -> str:
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Utils:
    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return name, name, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {
            "max_shared_mem": 1 << 30,
            "warpSize": self.target.warp_size,
            "multiprocessor_count": 132,
        }


class CompileOnlyDriver:
    """The part of Triton's driver interface that a launch touches; the launch itself does
    nothing."""

    def __init__(self, arch: str) -> None:
        self.target = TARGETS[arch]
        self.device = 6000 + list(TARGETS).index(arch)  # JITFunction caches per device id
        self.utils = _Utils(self.target)
        self.launcher_cls = lambda src, metadata: lambda *args: None

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextlib.contextmanager
def compile_only(arch: str) -> Iterator[list[CompiledKernel]]:
    """Launches inside the block only compile; yields the list of kernels compiled so far (each once
    a process).

    Tensors may be on the meta device: real shapes need no memory.
    """
    config = triton.runtime.driver
    previous, original = config._active, CompiledKernel.__init__
    kernels: list[CompiledKernel] = []

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        kernels.append(self)

    config.set_active(CompileOnlyDriver(arch))
    CompiledKernel.__init__ = remember
    try:
        yield kernels
    finally:
        CompiledKernel.__init__ = original
        config._active = previous
