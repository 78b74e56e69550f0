"""A Triton driver on top of the emulator: `with emulate("gfx950"): kernel[grid](...)`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler as triton_compiler

from gcn_emulator.counters import LDS_BYTES, Counters, StaticInfo
from gcn_emulator.formats import EmuError
from gcn_emulator.kernel import Kernel

_ASM_BY_HASH: dict[str, str] = {}
_KERNELS: dict[tuple[str, str], Kernel] = {}  # by KernelKey


def _remember_asm() -> None:
    """The launcher sees only metadata, so keep the assembly of every compiled kernel."""
    original = triton_compiler.CompiledKernel.__init__
    if getattr(original, "_gcn_emulator", False):
        return

    def init(self: Any, src: Any, metadata_group: Any, hash: str) -> None:
        original(self, src, metadata_group, hash)
        _ASM_BY_HASH[self.metadata.hash] = self.asm.get("amdgcn", "")

    init._gcn_emulator = True  # type: ignore[attr-defined]
    triton_compiler.CompiledKernel.__init__ = init


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The whole storage of a CPU tensor as a writable uint8 array."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


KernelKey = tuple[str, str]  # Triton's hash of the compiled kernel, architecture


def assembly(key: KernelKey) -> str:
    """The assembly of a kernel that has been compiled in this process."""
    return _ASM_BY_HASH[key[0]]


@dataclass
class LaunchRecord:
    """What one launch did."""

    name: str
    grid: tuple[int, int, int]
    static: StaticInfo
    counters: Counters | None
    key: KernelKey


class _Utils:
    def __init__(self, driver: EmulatorDriver) -> None:
        self.driver = driver

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # module, function, registers, spills, most threads; no module, because Triton would unload
        # it through whichever driver is active when the kernel is garbage-collected
        return None, name, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, Any]:
        arch = self.driver.arch
        return {
            "arch": arch,
            "warpSize": 64,
            "max_shared_mem": LDS_BYTES[arch],
            "multiprocessor_count": 256 if arch == "gfx950" else 304,
            "max_num_regs": 131072,
        }


def _descriptor_parts(descriptor: Any) -> list[Any]:
    """Kernel arguments a host-side tensor descriptor becomes on these architectures (no TDM)."""
    decompose = getattr(triton.backends.driver, "decompose_descriptor", None)
    if decompose is not None:  # Triton 3.7 and later
        return list(decompose(descriptor))
    shape, strides = descriptor.shape, descriptor.strides
    return [descriptor.base, *shape, *strides, descriptor.padding == "nan", *shape, *strides]


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.metadata, self.signature = metadata, list(src.signature.values())

    def _flatten(self, value: Any, kind: Any, out: list[Any], regions: list[np.ndarray]) -> None:
        if kind == "constexpr":
            return
        if isinstance(kind, tuple):
            for v, k in zip(value, kind, strict=True):
                self._flatten(v, k, out, regions)
        elif isinstance(kind, str) and kind.startswith("tensordesc"):
            for part in _descriptor_parts(value):
                self._flatten(part, "i64", out, regions)
        elif isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise EmuError(f"tensor on {value.device}; the emulator needs CPU tensors")
            out.append(value.data_ptr())
            regions.append(storage_bytes(value))
        elif value is None:
            out.append(0)
        else:
            out.append(float(value) if kind in ("fp32", "fp64") else int(value))

    def __call__(
        self, gx: int, gy: int, gz: int, stream: int, function: Any, packed: Any,
        launch_metadata: Any, enter: Any, exit_: Any, *args: Any,
    ) -> None:  # fmt: skip
        driver, meta = triton.runtime.driver.active, self.metadata
        values: list[Any] = []
        regions: list[np.ndarray] = []
        for value, kind in zip(args, self.signature, strict=False):
            self._flatten(value, kind, values, regions)
        key = (meta.hash, meta.target.arch)
        if key not in _KERNELS:
            _KERNELS[key] = Kernel(_ASM_BY_HASH[meta.hash], meta.target.arch)
        kernel = _KERNELS[key]
        scratch = getattr(meta, "global_scratch_size", 0)  # Triton 3.6 has none on AMD
        if scratch:
            values.append(np.zeros(scratch * gx * gy * gz + 64, np.uint8))
        driver.launch(kernel, meta, (gx, gy, gz), values, regions)


class EmulatorDriver:
    """The part of Triton's driver interface that compiling and launching needs."""

    binary_ext = "hsaco"

    def __init__(
        self, arch: str = "gfx950", races: bool = True, lazy: bool = True, counters: bool = False
    ) -> None:
        if arch not in LDS_BYTES:
            raise EmuError(f"unsupported architecture {arch}")
        _remember_asm()
        self.arch, self.races, self.lazy, self.count = arch, races, lazy, counters
        self.records: list[LaunchRecord] = []
        self.utils = _Utils(self)
        self.launcher_cls = _Launcher

    def launch(
        self, kernel: Kernel, meta: Any, grid: tuple[int, int, int], values: list[Any],
        regions: list[np.ndarray],
    ) -> None:  # fmt: skip
        """Run a kernel and record what it did; LDS races are errors."""
        counters = Counters(self.arch) if self.count else None
        static = kernel.static(meta.shared, meta.num_warps)
        if static.lds > LDS_BYTES[self.arch]:
            raise EmuError(f"{meta.name}: {static.lds} bytes of LDS on {self.arch}")
        kernel.run(
            grid, values, meta.shared, meta.num_warps, regions=regions, lazy=self.lazy,
            races=self.races, counters=counters,
        )  # fmt: skip
        key = (meta.hash, meta.target.arch)
        self.records.append(LaunchRecord(meta.name, grid, static, counters, key))
        if kernel.races:
            raise EmuError(f"LDS race in {meta.name}: {dict(kernel.races)}")

    def get_current_device(self) -> int:
        """A different id per architecture, because JITFunction caches per device."""
        return int(self.arch[3:])

    def set_current_device(self, device: int) -> None:
        """There is only one device."""

    def get_current_stream(self, device: int = 0) -> int:
        """Launches are synchronous."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return GPUTarget("hip", self.arch, 64)

    def get_active_torch_device(self) -> torch.device:
        """Tensors live on the CPU."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """torch.cpu."""
        return torch.cpu

    @staticmethod
    def is_active() -> bool:
        """Always available."""
        return True

    def get_benchmarker(self) -> Callable[..., float]:
        """Autotuning picks the first configuration: time means nothing here."""

        def bench(fn: Callable[[], Any], **kwargs: Any) -> float:
            fn()
            return 1.0

        return bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Unused."""
        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        """Unused."""

    def map_python_to_cpp_type(self, kind: str) -> str:
        """Unused: no C launcher is generated."""
        return kind


@contextlib.contextmanager
def emulate(
    arch: str = "gfx950", *, races: bool = True, lazy: bool = True, counters: bool = False
) -> Iterator[EmulatorDriver]:
    """Run Triton kernels launched inside the block on the emulator."""
    config = triton.runtime.driver
    previous = config._active
    driver = EmulatorDriver(arch, races, lazy, counters)
    config.set_active(driver)
    # Decoding makes a closure per instruction; without this the collector walks everything torch
    # and Triton hold every few thousand of them, which takes four times as long as the decoding.
    gc.freeze()
    try:
        yield driver
    finally:
        gc.unfreeze()
        config._active = previous
