"""`inkling-rocm generate`: one answer, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from inkling_rocm.cli import engine_options as options


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; default: read stdin.")] = None,
    model_path: options.ModelPath = "demo",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System message (chat only).")] = None,
    reasoning_effort: Annotated[
        str, typer.Option(help="none, minimal, low, medium, high, max, or 0 to 1 (chat only).")
    ] = "high",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.", min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="1 = off.", min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1 = off.", min=-1)] = -1,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    load_format: options.LoadFormat = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    context_length: options.ContextLength = None,
    attention_backend: options.AttentionBackend = "auto",
    moe_runner_backend: options.MoeRunnerBackend = "auto",
    tp_size: options.TpSize = 1,
    ep_size: options.EpSize = 1,
    json_model_override_args: options.JsonModelOverrideArgs = "{}",
    disable_cuda_graph: options.DisableCudaGraph = False,
    cuda_graph_max_bs: options.CudaGraphMaxBs = None,
    cuda_graph_bs: options.CudaGraphBs = None,
    cuda_graph_max_bs_prefill: options.CudaGraphMaxBsPrefill = None,
    disable_prefill_cuda_graph: options.DisablePrefillCudaGraph = False,
    disable_radix_cache: options.DisableRadixCache = False,
    speculative_algorithm: options.SpeculativeAlgorithm = None,
    speculative_draft_model_path: options.SpeculativeDraftModelPath = None,
    speculative_num_steps: options.SpeculativeNumSteps = None,
    speculative_num_draft_tokens: options.SpeculativeNumDraftTokens = None,
    speculative_use_rejection_sampling: options.SpeculativeUseRejectionSampling = False,
    speculative_adaptive: options.SpeculativeAdaptive = False,
    log_level: options.LogLevel = "warning",
) -> None:
    """Answer one prompt. The answer goes to stdout, reasoning and tool calls to stderr."""
    options.set_up_logging(log_level)
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty: give it as an argument or on stdin")
    args = options.engine_args(
        model_path=model_path,
        load_format=load_format,
        dtype=dtype,
        device=device,
        context_length=context_length,
        attention_backend=attention_backend,
        moe_runner_backend=moe_runner_backend,
        tp_size=tp_size,
        ep_size=ep_size,
        json_model_override_args=json_model_override_args,
        disable_cuda_graph=disable_cuda_graph,
        cuda_graph_max_bs=cuda_graph_max_bs,
        cuda_graph_bs=tuple(cuda_graph_bs) if cuda_graph_bs else None,
        cuda_graph_max_bs_prefill=cuda_graph_max_bs_prefill,
        disable_prefill_cuda_graph=disable_prefill_cuda_graph,
        disable_radix_cache=disable_radix_cache,
        speculative_algorithm=speculative_algorithm,
        speculative_draft_model_path=speculative_draft_model_path,
        speculative_num_steps=speculative_num_steps,
        speculative_num_draft_tokens=speculative_num_draft_tokens,
        speculative_use_rejection_sampling=speculative_use_rejection_sampling,
        speculative_adaptive=speculative_adaptive,
    )
    from inkling_rocm.engine import Engine, SamplingParams
    from inkling_rocm.server.errors import ApiError

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    try:
        with Engine(args) as engine:
            if raw:
                _stream_raw(engine, text, params)
            else:
                _stream_chat(engine, text, system, reasoning_effort, params)
    except (*options.MISTAKES, ApiError, _GenerationFailed) as error:
        raise options.fail(error) from error


class _GenerationFailed(Exception):
    """The engine gave up on the answer."""


def _updates(engine, ids, params):
    """The updates of one request. Raises: _GenerationFailed: it ended by an error or an abort."""
    for update in engine.submit(ids, params):
        yield update
        if update.finish_reason in ("error", "abort"):
            typer.echo()
            raise _GenerationFailed(update.error or "the request was aborted")


def _stream_raw(engine, text: str, params) -> None:
    for update in _updates(engine, engine.tokenizer.encode(text), params):
        typer.echo(update.text, nl=False)
    typer.echo()


def _stream_chat(engine, text: str, system: str | None, effort: str, params) -> None:
    from inkling_rocm.server.blocks import TurnParser
    from inkling_rocm.server.protocol import ChatMessage
    from inkling_rocm.server.render import ChatRenderer, parse_effort

    messages = [ChatMessage(role="user", content=text)]
    if system:
        messages.insert(0, ChatMessage(role="system", content=system))
    renderer = ChatRenderer(engine.tokenizer.native)
    prompt = renderer.render(messages, effort=parse_effort(effort))
    parser = TurnParser(engine.tokenizer.token_bytes)
    for update in _updates(engine, prompt.ids, params):
        deltas = [delta for token in update.token_ids for delta in parser.feed(token)]
        if update.finish_reason is not None:
            deltas += parser.finish()
        for delta in deltas:
            _show(delta.kind, delta.text)
    typer.echo()


def _show(kind: str, text: str) -> None:
    if kind == "content":
        typer.echo(text, nl=False)
    elif kind == "tool_end":
        typer.echo(")", err=True)
    else:
        suffix = "(" if kind == "tool_name" else ""
        typer.secho(text + suffix, nl=False, err=True, dim=True)
