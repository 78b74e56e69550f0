"""`inkling-rocm bench layer` and `kernels`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from inkling_rocm.cli import engine_options as options
from inkling_rocm.cli.bench_options import OutputFile, Seed, numbers

Batches = Annotated[str, typer.Option(help="Decode batch sizes, separated by commas.")]
Context = Annotated[int, typer.Option(help="Tokens that each decoding request holds.", min=0)]
Prefill = Annotated[int, typer.Option(help="Tokens of a prefill; 0 = none.", min=0)]


def _layer_bench(cases: list, fields: dict[str, Any]):
    """A LayerBench of the model that the options name, with random weights."""
    from inkling_rocm.bench.layer import LayerBench
    from inkling_rocm.engine.load import load_parts

    tokens = max(case.rows * (case.context + case.tokens) for case in cases)
    args = options.engine_args(
        load_format="dummy",
        skip_tokenizer_init=True,
        max_running_requests=max(case.rows for case in cases),
        context_length=max(case.context + case.tokens for case in cases),
        # A page more for each sequence, so that none shares its last one.
        max_total_tokens=tokens + 64 * max(case.rows for case in cases),
        chunked_prefill_size=-1,
        **fields,
    )
    if args.rank_slice is not None:
        typer.echo(f"one rank of {args.rank_slice} alone: outputs are meaningless", err=True)
    return LayerBench(load_parts(args), args, cases), args


def _cases(batches: str, context: int, prefill: int) -> list:
    from inkling_rocm.bench.layer import Case

    cases = [Case(rows=b, context=context, tokens=1) for b in numbers(batches, "--batches")]
    if prefill:
        cases.append(Case(rows=1, context=0, tokens=prefill))
    if not cases:
        raise typer.BadParameter("no --batches and no --prefill: nothing to measure")
    return cases


def layer(
    model_path: options.ModelPath = "demo",
    rank_slice: options.RankSlice = None,
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    batches: Batches = "1,8,32,128",
    context: Context = 8192,
    prefill: Prefill = 8192,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    attention_backend: options.AttentionBackend = "auto",
    moe_runner_backend: options.MoeRunnerBackend = "auto",
    random_seed: Seed = 0,
    output_file: OutputFile = None,
) -> None:
    """Time of a layer (mean over the stack, random weights) beside its floor, and a table by op.

    The floor adds up, over a layer's ops, the larger of bytes at the memory rate and FLOPs at the
    matrix rate. Decode is timed as a graph on a GPU, prefill launched op by op and as a graph; the
    times of single ops are of eager launches under the profiler. --model-path may be a lone
    config.json.
    """
    from inkling_rocm.bench.report import layer_row, layer_text
    from inkling_rocm.bench.rows import append_rows

    cases = _cases(batches, context, prefill)
    fields = {
        "model_path": model_path,
        "rank_slice": rank_slice,
        "json_model_override_args": json_model_override_args,
        "dtype": dtype,
        "device": device,
        "attention_backend": attention_backend,
        "moe_runner_backend": moe_runner_backend,
        "random_seed": random_seed,
    }
    try:
        bench, args = _layer_bench(cases, fields)
        for found in bench.measure(cases):
            typer.echo(layer_text(found) + "\n")
            if output_file is not None:
                append_rows(output_file, [layer_row(found, bench.parts, args)])
    except options.MISTAKES as error:
        raise options.fail(error) from error


def kernels(
    model_path: options.ModelPath = "demo",
    rank_slice: options.RankSlice = None,
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    batches: Batches = "1,32",
    context: Context = 8192,
    prefill: Prefill = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    random_seed: Seed = 0,
    output_file: OutputFile = None,
) -> None:
    """Every variant of every op that can run here, alone, on what the model calls it with.

    Calls repeat on the same tensors, so caches are warm: compare variants, not ceilings.
    """
    from inkling_rocm.bench.kernels import measure_variants
    from inkling_rocm.bench.rows import append_rows

    cases = _cases(batches, context, prefill)
    fields = {
        "model_path": model_path,
        "rank_slice": rank_slice,
        "json_model_override_args": json_model_override_args,
        "dtype": dtype,
        "device": device,
        "random_seed": random_seed,
    }
    try:
        bench, args = _layer_bench(cases, fields)
        for case in cases:
            typer.echo(case.name)
            for row in measure_variants(bench, args, case):
                us = "-" if row["us"] is None else f"{row['us']:.1f} us"
                typer.echo(f"  {row['op']:<20} {row['variant']:<8} {us:>12}  {row['reason'] or ''}")
                if output_file is not None:
                    append_rows(output_file, [row])
    except options.MISTAKES as error:
        raise options.fail(error) from error
