"""`inkling-rocm ops`: which implementation every op gets, and why not another."""

from __future__ import annotations

from typing import Annotated

import typer


def ops(
    model_path: Annotated[
        str, typer.Option(help="A checkpoint folder or config.json, or 'demo'.")
    ] = "demo",
    arch: Annotated[
        str | None,
        typer.Option(help="gfx942, gfx950, sm80, sm90, sm100 or cpu; default: this machine's."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", min=1)] = 1,
    ep: Annotated[
        int, typer.Option(help="Ranks that hold whole experts: 1, or the --tp ranks.", min=1)
    ] = 1,
    dtype: Annotated[str, typer.Option(help="auto = the checkpoint's.")] = "auto",
    attention_backend: Annotated[str, typer.Option(help="auto or a variant's name.")] = "auto",
    moe_runner_backend: Annotated[str, typer.Option(help="auto or a variant's name.")] = "auto",
) -> None:
    """Print the chosen variant of every op, with every refusal and its reason."""
    from inkling_rocm.cli.model_config import config_of
    from inkling_rocm.config import DTYPES
    from inkling_rocm.ops.explain import explain
    from kernel_base.arch import arch_named, default_arch

    try:
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype {dtype!r}: choose from auto, {', '.join(DTYPES)}")
        if ep not in (1, tp):
            raise ValueError(f"ep {ep}: wanted 1 or the {tp} tensor-parallel ranks")
        config = config_of(model_path)
        resolved = arch_named(arch) if arch else default_arch()
        report = explain(
            config,
            resolved,
            dtype=config.dtype if dtype == "auto" else dtype,
            attention_backend=attention_backend,
            moe_runner_backend=moe_runner_backend,
            tp_size=tp,
            ep_size=ep,
        )
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(report)
