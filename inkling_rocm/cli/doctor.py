"""`inkling-rocm doctor`: what this machine can run, and what is missing for the rest."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

from inkling_rocm.cli.doctor_sglang import sglang_lines

GIB = 1 << 30
ENGINES = ("embedded", "sglang")


def doctor(
    model_path: Annotated[
        str | None,
        typer.Option(help="Also check whether this checkpoint (folder or config.json) fits."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks for that check.", min=1)] = 1,
    engine: Annotated[
        str, typer.Option(help="embedded, or sglang: would SGLang serve our model here.")
    ] = "embedded",
) -> None:
    """Say what this machine can run and why not the rest. Exits 1 when nothing can be served."""
    if engine not in ENGINES:
        raise typer.BadParameter(f"engine {engine!r}: choose from {', '.join(ENGINES)}")
    lines, can_serve = report(model_path, tp, engine)
    typer.echo("\n".join(lines))
    if not can_serve:
        raise typer.Exit(1)


def report(model_path: str | None, tp: int, engine: str = "embedded") -> tuple[list[str], bool]:
    """(lines to print, whether `engine` can serve a model here)."""
    lines = [f"python        {platform.python_version()} on {platform.platform()}"]
    for probe in (_torch_lines, _triton_lines, _aiter_lines):
        lines += probe()
    if engine == "sglang":
        sglang, missing = sglang_lines()
        lines += sglang
    else:
        missing = [name for name in _REQUIRED if find_spec(name) is None]
        for name, purpose in _REQUIRED.items():
            lines.append(f"{name:<13} {'missing' if name in missing else 'present'}: {purpose}")
    if model_path is not None:
        try:
            lines += _memory_lines(model_path, tp)
            if engine == "sglang":
                lines += ["", *_variant_lines(model_path, tp)]
        except (ValueError, OSError) as error:
            lines.append(f"model         {error}")
            missing.append("model")
    lines.append("")
    if missing and engine == "sglang":
        lines += [f"cannot serve: {problem}" for problem in missing]
    elif missing:
        lines.append(f"cannot serve: {', '.join(missing)} (install inkling-rocm again with pip)")
    else:
        lines.append("can serve; `inkling-rocm ops` shows which implementation each op gets")
    return lines, not missing


_REQUIRED = {
    "fastapi": "the HTTP server",
    "uvicorn": "the HTTP server",
    "tml_renderers": "tokenizer and chat rendering",
    "llguidance": "JSON schemas and tools",
}


def _torch_lines() -> list[str]:
    import torch

    from kernel_base.arch import arch_of_device

    build = torch.version.hip and f"ROCm {torch.version.hip}"
    build = build or (torch.version.cuda and f"CUDA {torch.version.cuda}") or "CPU only"
    lines = [f"torch         {torch.__version__} ({build})"]
    if not torch.cuda.is_available():
        lines.append(
            "device        cpu: every op on its torch reference; for tiny models and tests"
        )
        return lines
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
        try:
            arch = arch_of_device(f"cuda:{index}").name
        except ValueError as error:
            arch = f"unsupported: {error}"
        lines.append(f"device        cuda:{index} {properties.name}, {memory}, {arch}")
    return lines


def _triton_lines() -> list[str]:
    if find_spec("triton") is None:
        return [
            "triton        missing: no Triton kernels and no `verify`; on ROCm torch brings it, "
            "elsewhere pip install 'inkling-rocm[triton]'"
        ]
    return [f"triton        {version('triton')}"]


def _aiter_lines() -> list[str]:
    try:
        return [f"aiter         amd-aiter {version('amd-aiter')} (imports only on ROCm)"]
    except PackageNotFoundError:
        pass
    if find_spec("aiter") is None:
        return ["aiter         missing: AMD's kernel library, optional (package amd-aiter)"]
    try:
        other = f"package aiter {version('aiter')} is an unrelated project: uninstall it"
    except PackageNotFoundError:
        other = "built from source, version unknown"
    return [f"aiter         {other}"]


def _memory_lines(model_path: str, tp: int) -> list[str]:
    import torch

    from inkling_rocm.checkpoint import weight_bytes
    from inkling_rocm.cli.model_config import config_of

    config = config_of(model_path)
    needed = weight_bytes(config, getattr(torch, config.dtype), tp)
    lines = [f"model         {needed / GIB:.1f} GiB of {config.dtype} weights a rank at TP{tp}"]
    if torch.cuda.is_available():
        free = min(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
        lines.append(
            f"              {free / GIB:.1f} GiB free on the fullest GPU: "
            + ("fits" if needed < free else "does not fit; raise --tp")
        )
    return lines


def _variant_lines(model_path: str, tp: int) -> list[str]:
    """The implementation each op gets, as `inkling-rocm ops` prints it."""
    from inkling_rocm.cli.model_config import config_of
    from inkling_rocm.ops.explain import explain
    from kernel_base.arch import default_arch

    config = config_of(model_path)
    return explain(config, default_arch(), dtype=config.dtype, tp_size=tp).splitlines()
