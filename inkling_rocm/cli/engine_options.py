"""The engine's options as `serve` and `generate` share them, under SGLang's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from inkling_rocm.engine import EngineArgs

ModelPath = Annotated[str, typer.Option(help="Checkpoint folder, or 'demo' for a generated one.")]
TokenizerPath = Annotated[
    str | None, typer.Option(help="Accepted for SGLang's sake: the tokenizer is built in.")
]
LoadFormat = Annotated[str, typer.Option(help="'auto', or 'dummy' for random weights.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: a GPU if there is one.")]
ContextLength = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and output together.")
]
PageSize = Annotated[int, typer.Option(help="Tokens of a K/V page: 1, 16, 64 or 128.")]
ChunkedPrefillSize = Annotated[
    int | None, typer.Option(help="Most prompt tokens in one forward; -1 = no limit.")
]
MaxRunningRequests = Annotated[int | None, typer.Option(help="Sequences in one batch.")]
MaxQueuedRequests = Annotated[int, typer.Option(help="Waiting requests before new ones get 429.")]
MaxTotalTokens = Annotated[int | None, typer.Option(help="Tokens the global page pool holds.")]
MemFractionStatic = Annotated[
    float | None, typer.Option(help="Share of free memory for pools and rings.")
]
AttentionBackend = Annotated[str, typer.Option(help="auto or a variant's name; see `ops`.")]
MoeRunnerBackend = Annotated[str, typer.Option(help="auto or a variant's name; see `ops`.")]
DisableCudaGraph = Annotated[bool, typer.Option(help="Run every step kernel by kernel.")]
CudaGraphMaxBs = Annotated[
    int | None, typer.Option(help="Largest decode batch with a graph; default: all batches.")
]
CudaGraphBs = Annotated[
    list[int] | None, typer.Option(help="Batch sizes that get a graph; repeatable.")
]
CudaGraphMaxBsPrefill = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of a prompt step with a graph, more than 16; default: 1024. With "
        "speculation no prompt step has one."
    ),
]
DisablePrefillCudaGraph = Annotated[
    bool, typer.Option(help="Run prompt steps kernel by kernel, decode steps from graphs.")
]
DisableRadixCache = Annotated[
    bool, typer.Option(help="Compute every prompt whole; see docs/prefix_cache.md.")
]
PrefixSnapshots = Annotated[
    int | None,
    typer.Option(help="Prefixes kept for reuse; default: 4 for each of --max-running-requests."),
]
EnableHierarchicalCache = Annotated[
    bool, typer.Option(help="Keep in host memory what the prefix cache gives up.")
]
HicacheSize = Annotated[
    float | None, typer.Option(help="GB of host memory for it; default: twice the device's.")
]
HicacheStorageBackend = Annotated[
    str | None, typer.Option(help="file: a third tier on disk, in --hicache-storage-dir.")
]
HicacheStorageDir = Annotated[str | None, typer.Option(help="Its folder.")]
HicacheStorageSize = Annotated[float | None, typer.Option(help="GB it may take; default: 100.")]
DisableOverlapSchedule = Annotated[
    bool, typer.Option(help="Wait for a step's tokens before scheduling the next.")
]
SpeculativeAlgorithm = Annotated[
    str | None,
    typer.Option(
        help="EAGLE: draft with the checkpoint's own blocks; DFLASH: with a draft model that fills "
        "a block in one forward; see docs/speculation.md, docs/dflash.md."
    ),
]
SpeculativeDraftModelPath = Annotated[
    str | None, typer.Option(help="DFLASH's draft: its folder, or 'demo' for a random one.")
]
SpeculativeNumSteps = Annotated[
    int | None, typer.Option(help="Drafts of a round; default: 3, or as many as there are blocks.")
]
SpeculativeNumDraftTokens = Annotated[
    int | None,
    typer.Option(help="DFLASH: tokens of a block, at most the draft's; EAGLE: steps + 1."),
]
SpeculativeEagleTopk = Annotated[
    int | None, typer.Option(help="Accepted for SGLang's sake: 1, drafts are a chain.")
]
SpeculativeUseRejectionSampling = Annotated[
    bool,
    typer.Option(
        help="Accept drafts of random requests by rejection sampling: the same distribution, "
        "other tokens than without speculation."
    ),
]
SpeculativeAdaptive = Annotated[
    bool,
    typer.Option(
        help="Choose the drafts of each round by measured tokens per second; "
        "--speculative-num-steps at most."
    ),
]
RandomSeed = Annotated[int, typer.Option(help="Seeds of requests without one, dummy weights.")]
TpSize = Annotated[
    int,
    typer.Option(
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        help="Tensor-parallel ranks: one process and one GPU each.",
        min=1,
    ),
]
EpSize = Annotated[
    int,
    typer.Option(
        "--ep",
        "--ep-size",
        "--expert-parallel-size",
        help="Ranks that hold whole experts: 1 (all are split by width), or the --tp size.",
        min=1,
    ),
]
DistTimeout = Annotated[int, typer.Option(help="Seconds that ranks wait for each other.", min=1)]
JsonModelOverrideArgs = Annotated[
    str,
    typer.Option(help="JSON that replaces values of config.json: '{\"num_hidden_layers\": 8}'."),
]
RankSlice = Annotated[
    int | None,
    typer.Option(
        help="Measure one rank of a tensor-parallel group of this size alone, without the others: "
        "its outputs are meaningless.",
        min=1,
    ),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]

# What a wrong argument or checkpoint raises: these are told, everything else is a traceback.
MISTAKES = (ValueError, OSError)


def engine_args(**fields: Any) -> EngineArgs:
    """EngineArgs from options; a wrong value ends the command with its message."""
    from inkling_rocm.engine import EngineArgs

    try:
        return EngineArgs(**fields)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def set_up_logging(level: str) -> None:
    """Log to stderr from `level` up."""
    import logging

    known = {"debug", "info", "warning", "error"}
    if level.lower() not in known:
        raise typer.BadParameter(f"log level {level!r}: choose from {', '.join(sorted(known))}")
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def require_triton(what: str) -> None:
    """Ends the command where there is no Triton."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise fail(
            ValueError(
                f"{what} needs triton: pip install 'inkling-rocm[triton]' (a ROCm image brings it)"
            )
        )


def fail(error: Exception) -> typer.Exit:
    """Prints what was wrong; raise the result."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(1)
