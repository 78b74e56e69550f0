"""`inkling-rocm bench`: kernels, layer, offline, serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inkling_rocm.cli import engine_options as options

app = typer.Typer(
    name="bench",
    help="Measure ops, layers, the engine, or a server under load.",
    no_args_is_help=True,
)

OutputFile = Annotated[
    Path | None, typer.Option(help="Append result rows to this file, one JSON object a line.")
]
Batches = Annotated[str, typer.Option(help="Decode batch sizes, separated by commas.")]
Context = Annotated[int, typer.Option(help="Tokens that each decoding request holds.", min=0)]
Prefill = Annotated[int, typer.Option(help="Tokens of a prefill; 0 = none.", min=0)]
NumPrompts = Annotated[int, typer.Option(help="Requests to send.", min=1)]
InputLen = Annotated[int, typer.Option(help="Most prompt tokens.", min=1)]
OutputLen = Annotated[int, typer.Option(help="Tokens to generate, at most.", min=1)]
RangeRatio = Annotated[
    float, typer.Option(help="Lengths are uniform in [ratio * length, length].", min=0, max=1)
]
Seed = Annotated[int, typer.Option(help="Of prompts, lengths and arrivals; of dummy weights.")]


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: wanted numbers, as 1,8,32") from error
    if any(n < 1 for n in numbers):
        raise typer.BadParameter(f"{option} {text!r}: wanted at least 1")
    return numbers


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

    cases = [Case(rows=b, context=context, tokens=1) for b in _numbers(batches, "--batches")]
    if prefill:
        cases.append(Case(rows=1, context=0, tokens=prefill))
    if not cases:
        raise typer.BadParameter("no --batches and no --prefill: nothing to measure")
    return cases


@app.command()
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


@app.command()
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


@app.command()
def offline(
    model_path: options.ModelPath = "demo",
    load_format: options.LoadFormat = "dummy",
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    tp_size: options.TpSize = 1,
    ep_size: options.EpSize = 1,
    rank_slice: options.RankSlice = None,
    num_prompts: NumPrompts = 64,
    random_input_len: InputLen = 1024,
    random_output_len: OutputLen = 128,
    random_range_ratio: RangeRatio = 0.0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    context_length: options.ContextLength = None,
    max_running_requests: options.MaxRunningRequests = None,
    chunked_prefill_size: options.ChunkedPrefillSize = None,
    mem_fraction_static: options.MemFractionStatic = None,
    max_total_tokens: options.MaxTotalTokens = None,
    attention_backend: options.AttentionBackend = "auto",
    moe_runner_backend: options.MoeRunnerBackend = "auto",
    seed: Seed = 1,
    output_file: OutputFile = None,
    log_level: options.LogLevel = "warning",
) -> None:
    """Throughput of the engine when every prompt is there from the start."""
    _in_process(
        locals(),
        concurrencies=[num_prompts],
        request_rate=float("inf"),
        warmup_requests=1,
        plot=None,
    )


@app.command()
def serving(
    backend: Annotated[
        str,
        typer.Option(
            help="sglang (/generate of SGLang's or this project's server), openai or vllm "
            "(/v1/completions), or inkling-rocm-engine: the engine in this process, without HTTP."
        ),
    ] = "sglang",
    base_url: Annotated[str | None, typer.Option(help="Instead of --host and --port.")] = None,
    host: Annotated[str, typer.Option(help="Of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the server.")] = 30000,
    model: Annotated[
        str, typer.Option("--model", "--model-path", help="Name at the server, or what to load.")
    ] = "demo",
    api_key: Annotated[str | None, typer.Option(help="For servers that want one.")] = None,
    num_prompts: NumPrompts = 64,
    random_input_len: InputLen = 1024,
    random_output_len: OutputLen = 128,
    random_range_ratio: RangeRatio = 0.0,
    prompts_per_concurrency: Annotated[
        int | None,
        typer.Option(help="Send so many for each request in flight, --num-prompts at most.", min=1),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Arrivals a second (Poisson); inf = all at once.")
    ] = float("inf"),
    max_concurrency: Annotated[
        str | None,
        typer.Option(help="Most requests in flight; several (1,2,4,8) make a sweep."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Prompt ids are drawn below it (HTTP backends).", min=1)
    ] = 200000,
    num_gpus: Annotated[int, typer.Option(help="GPUs of the server, for per-GPU rates.")] = 1,
    warmup_requests: Annotated[int, typer.Option(help="Sent before the clock starts.")] = 1,
    seed: Seed = 1,
    load_format: options.LoadFormat = "dummy",
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    tp_size: options.TpSize = 1,
    ep_size: options.EpSize = 1,
    rank_slice: options.RankSlice = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    context_length: options.ContextLength = None,
    max_running_requests: options.MaxRunningRequests = None,
    chunked_prefill_size: options.ChunkedPrefillSize = None,
    mem_fraction_static: options.MemFractionStatic = None,
    max_total_tokens: options.MaxTotalTokens = None,
    attention_backend: options.AttentionBackend = "auto",
    moe_runner_backend: options.MoeRunnerBackend = "auto",
    output_file: OutputFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write throughput against interactivity to this PNG.")
    ] = None,
    log_level: options.LogLevel = "warning",
) -> None:
    """Time to first token, inter-token latency and throughput under load: SGLang's bench_serving.

    Prompts are random ids, answers are greedy and ignore end tokens. The engine's options
    (--load-format to --moe-runner-backend) count with --backend inkling-rocm-engine only.
    """
    concurrencies = _numbers(max_concurrency or str(num_prompts), "--max-concurrency")
    if backend == "inkling-rocm-engine":
        _in_process(
            {**locals(), "model_path": model},
            concurrencies=concurrencies,
            request_rate=request_rate,
            warmup_requests=warmup_requests,
            prompts_per_concurrency=prompts_per_concurrency,
            plot=plot,
        )
        return
    if backend not in ("sglang", "openai", "vllm"):
        raise typer.BadParameter(
            f"backend {backend!r}: choose from sglang, openai, vllm, inkling-rocm-engine"
        )
    options.set_up_logging(log_level)
    from inkling_rocm.bench.clients import HttpClient
    from inkling_rocm.bench.sweep import Sweep

    try:
        client = HttpClient(base_url or f"http://{host}:{port}", backend, model, api_key)
        Sweep(
            backend=backend,
            model=model,
            num_prompts=num_prompts,
            input_len=random_input_len,
            output_len=random_output_len,
            range_ratio=random_range_ratio,
            request_rate=request_rate,
            vocabulary=vocab_size,
            seed=seed,
            warmup_requests=warmup_requests,
            prompts_per_concurrency=prompts_per_concurrency,
            gpus=num_gpus,
            facts={"device": "of the server", "evidence": "measured"},
        ).run(client, concurrencies, output_file=output_file, plot=plot)
    except options.MISTAKES as error:
        raise options.fail(error) from error


_ENGINE_FIELDS = (
    "model_path", "load_format", "json_model_override_args", "tp_size", "ep_size", "rank_slice",
    "dtype", "device", "context_length", "max_running_requests", "chunked_prefill_size",
    "mem_fraction_static", "max_total_tokens", "attention_backend", "moe_runner_backend",
)  # fmt: skip


def _in_process(
    given: dict[str, Any],
    *,
    concurrencies: list[int],
    request_rate: float,
    warmup_requests: int,
    plot: Path | None,
    prompts_per_concurrency: int | None = None,
) -> None:
    """A sweep over an engine in this process; `given` are the command's options by name."""
    options.set_up_logging(given["log_level"])
    fields = {name: given[name] for name in _ENGINE_FIELDS}
    if fields["max_running_requests"] is None:
        fields["max_running_requests"] = max(concurrencies)
    args = options.engine_args(
        skip_tokenizer_init=True,
        max_queued_requests=given["num_prompts"],
        random_seed=given["seed"],
        **fields,
    )
    from inkling_rocm.bench.clients import EngineClient
    from inkling_rocm.bench.rows import machine
    from inkling_rocm.bench.sweep import Sweep
    from inkling_rocm.engine import Engine
    from inkling_rocm.engine.load import choose_device

    try:
        with Engine(args) as engine:
            Sweep(
                backend="inkling-rocm-engine",
                model=engine.model_name,
                num_prompts=given["num_prompts"],
                input_len=given["random_input_len"],
                output_len=given["random_output_len"],
                range_ratio=given["random_range_ratio"],
                request_rate=request_rate,
                vocabulary=engine.config.text.unpadded_vocab_size,
                seed=given["seed"],
                warmup_requests=warmup_requests,
                prompts_per_concurrency=prompts_per_concurrency,
                gpus=args.ranks,
                facts={
                    **machine(choose_device(args.device)),
                    "num_layers": engine.config.text.num_layers,
                    "tp_size": args.tp_size,
                    "ep_size": args.ep_size,
                    "rank_slice": args.rank_slice,
                },
            ).run(EngineClient(engine), concurrencies, output_file=given["output_file"], plot=plot)
    except options.MISTAKES as error:
        raise options.fail(error) from error
