"""Compile what a launcher would launch, for any target, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
        self.target = GPUTarget("cuda", 0, 32) if arch is None else TARGETS[arch]
        self.device = 5000 + list(TARGETS).index(arch)  # JITFunction caches per device id
        self.utils = _Utils(self.target)
        self.launcher_cls = lambda src, metadata: lambda *args: None
        self.kernels: list[CompiledKernel] = []

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
def compile_only(arch: str) -> Iterator[CompileOnlyDriver]:
    """Launches inside the block only compile; `.kernels` lists what was compiled (not what came
    from a cache)."""
    config = triton.runtime.driver
    previous, original = config._active, CompiledKernel.__init__
    driver = CompileOnlyDriver(arch)

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        driver.kernels.append(self)

    config.set_active(driver)
    CompiledKernel.__init__ = remember
    try:
        yield driver
    finally:
        CompiledKernel.__init__ = original
        config._active = previous
