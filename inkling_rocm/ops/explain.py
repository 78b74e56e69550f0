"""What was chosen for every op, as text."""

from __future__ import annotations

from inkling_rocm.config import InklingConfig
from inkling_rocm.ops.registry import resolve_ops
from kernel_base.arch import Arch


def explain(
    config: InklingConfig,
    arch: Arch,
    *,
    dtype: str,
    attention_backend: str = "auto",
    moe_runner_backend: str = "auto",
    tp_size: int = 1,
    ep_size: int = 1,
) -> str:
    """A table: op, chosen variant, every refused variant with its reason.

    Raises: ValueError: an asked-for backend cannot run (see registry.choose).
    """
    ops = resolve_ops(
        config,
        arch,
        dtype=dtype,
        attention_backend=attention_backend,
        moe_runner_backend=moe_runner_backend,
        tp_size=tp_size,
        ep_size=ep_size,
    )
    products = ", ".join(arch.products)
    lines = [f"{arch.name} ({products}), {dtype}, TP{tp_size}, EP{ep_size}", ""]
    width = max(len(choice.op) for choice in ops.choices)
    for choice in ops.choices:
        lines.append(f"{choice.op:<{width}}  {choice.variant}")
        for name, reason in choice.refused.items():
            lines.append(f"{'':<{width}}    not {name}: {reason}")
    return "\n".join(lines)
