"""Architecture facts as data.

One row per architecture, which is resolved once, at start-up. Code asks it for a fact (wave size,
LDS); for the vendor only where instructions differ. Peak figures are the vendors' datasheet
numbers: they size floors and launch grids and are never reported as measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Vendor = Literal["amd", "nvidia", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Facts of one GPU architecture (or of the CPU).

    Attributes:
        name: the compiler's name: "gfx942", "gfx950", "sm80", "sm90", "sm100", "cpu".
        products: what users call the machines that have it.
        wave_size: threads that execute in lock step (wavefront or warp).
        compute_units: CUs or SMs of the largest product; 0 on a CPU.
        xcds: dies with an L2 of their own; workgroup i starts on XCD i % xcds.
        lds_bytes: most LDS (shared memory) one workgroup may allocate.
        vgprs: 32-bit vector registers a thread may use without spilling.
        hbm_bytes_per_s, bf16_flops: datasheet peaks of the largest product.
    """

    name: str
    vendor: Vendor
    products: tuple[str, ...]
    wave_size: int
    compute_units: int
    xcds: int
    lds_bytes: int
    vgprs: int
    hbm_bytes_per_s: float
    bf16_flops: float


_KIB = 1024

ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch(
            name="gfx942",
            vendor="amd",
            products=("MI300X", "MI325X"),
            wave_size=64,
            compute_units=304,
            xcds=8,
            lds_bytes=64 * _KIB,
            vgprs=512,
            hbm_bytes_per_s=6.0e12,
            bf16_flops=1.307e15,
        ),
        Arch(
            name="gfx950",
            vendor="amd",
            products=("MI355X", "MI350X"),
            wave_size=64,
            compute_units=256,
            xcds=8,
            lds_bytes=160 * _KIB,
            vgprs=512,
            hbm_bytes_per_s=8.0e12,
            bf16_flops=2.5e15,
        ),
        Arch(
            name="sm80",
            vendor="nvidia",
            products=("A100",),
            wave_size=32,
            compute_units=108,
            xcds=1,
            lds_bytes=163 * _KIB,
            vgprs=255,
            hbm_bytes_per_s=2.0e12,
            bf16_flops=3.12e14,
        ),
        Arch(
            name="sm90",
            vendor="nvidia",
            products=("H100", "H200"),
            wave_size=32,
            compute_units=132,
            xcds=1,
            lds_bytes=227 * _KIB,
            vgprs=255,
            hbm_bytes_per_s=4.8e12,
            bf16_flops=9.9e14,
        ),
        Arch(
            name="sm100",
            vendor="nvidia",
            products=("B200", "GB200"),
            wave_size=32,
            compute_units=148,
            xcds=1,
            lds_bytes=227 * _KIB,
            vgprs=255,
            hbm_bytes_per_s=8.0e12,
            bf16_flops=2.25e15,
        ),
        Arch(
            name="cpu",
            vendor="cpu",
            products=("CPU",),
            wave_size=1,
            compute_units=0,
            xcds=1,
            lds_bytes=0,
            vgprs=0,
            hbm_bytes_per_s=0.0,
            bf16_flops=0.0,
        ),
    )
}


def arch_named(name: str) -> Arch:
    """The facts of the architecture called `name`.

    Raises: ValueError: no such architecture; the message lists those there are.
    """
    try:
        return ARCHS[name]
    except KeyError:
        known = ", ".join(ARCHS)
        raise ValueError(f"unknown architecture {name!r}; known: {known}") from None


def arch_of_device(device) -> Arch:
    """The facts of the machine behind a `torch.device` (ROCm devices are "cuda" to torch).

    Raises: ValueError: a GPU whose architecture has no row here.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return ARCHS["cpu"]
    if device.type != "cuda":
        raise ValueError(
            f"device {device}: only cpu and cuda (NVIDIA or ROCm) devices are supported"
        )
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return arch_named(properties.gcnArchName.split(":")[0])
    # 8.6/8.9 share sm80's code, 10.3/12.x share sm100's: the row of the generation is the closest
    # fact we have.
    generation = {8: "sm80", 9: "sm90", 10: "sm100"}.get(properties.major)
    if generation is None:
        raise ValueError(
            f"{properties.name} (sm{properties.major}{properties.minor}) has no architecture row; "
            f"known: {', '.join(ARCHS)}"
        )
    return ARCHS[generation]


def request_arch(arch: Arch | str | None, tensor, *, package: str, reference: str) -> Arch:
    """The architecture a kernel launch runs on: the one given, else that of the tensor's device.

    Raises: ValueError: unknown name, or a CPU tensor without an architecture to emulate; the
        message names the package and its CPU reference.
    """
    arch = arch_of_device(tensor.device) if arch is None else arch
    arch = arch_named(arch) if isinstance(arch, str) else arch
    if arch.vendor == "cpu":
        raise ValueError(
            f"{package}: the tensors are on the CPU; use {reference}, or pass arch= inside "
            "gcn_emulator.emulate"
        )
    return arch


def default_arch() -> Arch:
    """The architecture of the first GPU torch sees, else the CPU."""
    import torch

    return arch_of_device("cuda:0" if torch.cuda.is_available() else "cpu")
