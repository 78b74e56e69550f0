"""`inkling-rocm serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from inkling_rocm.cli import engine_options as options


def serve(
    model_path: options.ModelPath = "demo",
    engine: Annotated[
        str,
        typer.Option(
            help="embedded, or sglang: all other arguments then go to "
            "`python -m sglang.launch_server` as they are."
        ),
    ] = "embedded",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any free port.", min=0, max=65535)] = 30000,
    api_key: Annotated[str | None, typer.Option(help="Key clients must send.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients ask for; default: --model-path.")
    ] = None,
    tokenizer_path: options.TokenizerPath = None,
    load_format: options.LoadFormat = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    context_length: options.ContextLength = None,
    page_size: options.PageSize = 64,
    chunked_prefill_size: options.ChunkedPrefillSize = None,
    max_running_requests: options.MaxRunningRequests = None,
    max_queued_requests: options.MaxQueuedRequests = 1024,
    max_total_tokens: options.MaxTotalTokens = None,
    mem_fraction_static: options.MemFractionStatic = None,
    attention_backend: options.AttentionBackend = "auto",
    moe_runner_backend: options.MoeRunnerBackend = "auto",
    tp_size: options.TpSize = 1,
    ep_size: options.EpSize = 1,
    dist_timeout: options.DistTimeout = 300,
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    disable_cuda_graph: options.DisableCudaGraph = False,
    cuda_graph_max_bs: options.CudaGraphMaxBs = None,
    cuda_graph_bs: options.CudaGraphBs = None,
    cuda_graph_max_bs_prefill: options.CudaGraphMaxBsPrefill = None,
    disable_prefill_cuda_graph: options.DisablePrefillCudaGraph = False,
    disable_radix_cache: options.DisableRadixCache = False,
    prefix_snapshots: options.PrefixSnapshots = None,
    enable_hierarchical_cache: options.EnableHierarchicalCache = False,
    hicache_size: options.HicacheSize = None,
    hicache_storage_backend: options.HicacheStorageBackend = None,
    hicache_storage_dir: options.HicacheStorageDir = None,
    hicache_storage_size: options.HicacheStorageSize = None,
    disable_overlap_schedule: options.DisableOverlapSchedule = False,
    speculative_algorithm: options.SpeculativeAlgorithm = None,
    speculative_draft_model_path: options.SpeculativeDraftModelPath = None,
    speculative_num_steps: options.SpeculativeNumSteps = None,
    speculative_num_draft_tokens: options.SpeculativeNumDraftTokens = None,
    speculative_eagle_topk: options.SpeculativeEagleTopk = None,
    speculative_use_rejection_sampling: options.SpeculativeUseRejectionSampling = False,
    speculative_adaptive: options.SpeculativeAdaptive = False,
    random_seed: options.RandomSeed = 0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin browsers may call from; repeatable.")
    ] = None,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body.", min=1)] = 16,
    drain_seconds: Annotated[
        int, typer.Option(help="Time for open requests after SIGTERM.", min=0)
    ] = 30,
    log_level: options.LogLevel = "info",
) -> None:
    """Serve a model over HTTP: OpenAI's endpoints, SGLang's /generate, /metrics."""
    if engine != "embedded":
        raise typer.BadParameter(f"--engine {engine}: choose from embedded, sglang")
    options.set_up_logging(log_level)
    args = options.engine_args(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        load_format=load_format,
        dtype=dtype,
        device=device,
        context_length=context_length,
        page_size=page_size,
        chunked_prefill_size=chunked_prefill_size,
        max_running_requests=max_running_requests,
        max_queued_requests=max_queued_requests,
        max_total_tokens=max_total_tokens,
        mem_fraction_static=mem_fraction_static,
        attention_backend=attention_backend,
        moe_runner_backend=moe_runner_backend,
        tp_size=tp_size,
        ep_size=ep_size,
        dist_timeout=dist_timeout,
        json_model_override_args=json_model_override_args,
        disable_cuda_graph=disable_cuda_graph,
        cuda_graph_max_bs=cuda_graph_max_bs,
        cuda_graph_bs=tuple(cuda_graph_bs) if cuda_graph_bs else None,
        cuda_graph_max_bs_prefill=cuda_graph_max_bs_prefill,
        disable_prefill_cuda_graph=disable_prefill_cuda_graph,
        speculative_algorithm=speculative_algorithm,
        speculative_draft_model_path=speculative_draft_model_path,
        speculative_num_steps=speculative_num_steps,
        speculative_num_draft_tokens=speculative_num_draft_tokens,
        speculative_eagle_topk=speculative_eagle_topk,
        speculative_use_rejection_sampling=speculative_use_rejection_sampling,
        speculative_adaptive=speculative_adaptive,
        disable_radix_cache=disable_radix_cache,
        prefix_snapshots=prefix_snapshots,
        enable_hierarchical_cache=enable_hierarchical_cache,
        hicache_size=hicache_size,
        hicache_storage_backend=hicache_storage_backend,
        hicache_storage_dir=hicache_storage_dir,
        hicache_storage_size=hicache_storage_size,
        disable_overlap_schedule=disable_overlap_schedule,
        random_seed=random_seed,
        served_model_name=served_model_name,
    )
    from inkling_rocm.server.context import ServerSettings
    from inkling_rocm.server.serve import EngineGone
    from inkling_rocm.server.serve import serve as run

    try:
        settings = ServerSettings(
            api_key=api_key,
            max_body_bytes=max_body_mib * 1024 * 1024,
            cors_origins=tuple(cors_origin or ()),
        )
        run(
            args,
            settings,
            host=host,
            port=port,
            drain_seconds=drain_seconds,
            access_log=log_level.lower() == "debug",
        )
    except (*options.MISTAKES, EngineGone) as error:
        raise options.fail(error) from error
