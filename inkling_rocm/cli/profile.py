"""`inkling-rocm profile`: where the time of the engine's steps goes, op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inkling_rocm.cli import engine_options as options


def profile(
    model_path: options.ModelPath = "demo",
    load_format: options.LoadFormat = "auto",
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    batch: Annotated[int, typer.Option(help="Requests that run together.", min=1)] = 8,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each.", min=1)] = 64,
    steps: Annotated[int, typer.Option(help="Forwards to profile.", min=1)] = 8,
    chunked_prefill_size: options.ChunkedPrefillSize = None,
    max_total_tokens: options.MaxTotalTokens = None,
    attention_backend: options.AttentionBackend = "auto",
    moe_runner_backend: options.MoeRunnerBackend = "auto",
    json: Annotated[Path | None, typer.Option(help="Write the table here as JSON.")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="ROCm: folder for rocprofv3's traces; default: temporary.")
    ] = None,
    inside_rocprof: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Profile a window of engine steps: launches, time, bytes and fraction of the memory bandwidth
    of every op. Under rocprofv3 on ROCm, torch.profiler elsewhere."""
    import json as json_format
    import sys
    import tempfile

    import torch

    from inkling_rocm.profile import run

    args = options.engine_args(
        model_path=model_path,
        load_format=load_format,
        json_model_override_args=json_model_override_args,
        dtype=dtype,
        device=device,
        skip_tokenizer_init=True,
        max_running_requests=max(batch, 1),
        chunked_prefill_size=chunked_prefill_size,
        max_total_tokens=max_total_tokens,
        attention_backend=attention_backend,
        moe_runner_backend=moe_runner_backend,
    )
    if phase not in ("decode", "prefill"):
        raise typer.BadParameter(f"phase {phase!r}: choose from decode, prefill")
    window: dict[str, Any] = {
        "phase": phase,
        "batch": batch,
        "input_len": input_len,
        "steps": steps,
    }
    try:
        if inside_rocprof is not None:
            run.run_inside_rocprof(args, inside_rocprof, **window)
            return
        if torch.version.hip is not None and device != "cpu":
            with tempfile.TemporaryDirectory() as temporary:
                folder = traces or Path(temporary)
                folder.mkdir(parents=True, exist_ok=True)
                found = run.profile_with_rocprof(sys.argv, folder)
        else:
            found = run.profile_with_torch(args, **window)
    except options.MISTAKES as error:
        raise options.fail(error) from None
    typer.echo(found.as_text())
    if json is not None:
        json.write_text(json_format.dumps(found.as_json(), indent=1), encoding="utf-8")
