"""`inkling-rocm bench offline` and `serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from inkling_rocm.cli import engine_options as options
from inkling_rocm.cli.bench_options import OutputFile, Seed, numbers

NumPrompts = Annotated[int, typer.Option(help="Requests to send.", min=1)]
InputLen = Annotated[int, typer.Option(help="Most prompt tokens.", min=1)]
OutputLen = Annotated[int, typer.Option(help="Tokens to generate, at most.", min=1)]
RangeRatio = Annotated[
    float, typer.Option(help="Lengths are uniform in [ratio * length, length].", min=0, max=1)
]


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
    concurrencies = numbers(max_concurrency or str(num_prompts), "--max-concurrency")
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
