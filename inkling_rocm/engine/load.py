"""From arguments to a model that can run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inkling_rocm.checkpoint.demo import resolve_model_path
from inkling_rocm.checkpoint.dflash import (
    allocate_dflash,
    dflash_bytes,
    fill_dflash_dummy,
    load_dflash_weights,
)
from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.entry import Part
from inkling_rocm.checkpoint.loader import load_weights
from inkling_rocm.checkpoint.table import allocate, weight_bytes
from inkling_rocm.config import InklingConfig, load_config
from inkling_rocm.config_dflash import DFlashConfig
from inkling_rocm.config_override import parse_override
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.free_memory import GIB, free_bytes
from inkling_rocm.engine.speculative.options import block_draft, draft_depths
from inkling_rocm.engine.tokenizer import InklingTokenizer, Tokenizer
from inkling_rocm.model import DraftBlocks, InklingModel
from inkling_rocm.model.dflash import DFlashModel
from inkling_rocm.model.layer import rank_text
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_of_device

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is made of. `model` and `drafts` hold one rank's shard of args.ranks,
    `block_draft` is whole on each."""

    config: InklingConfig
    model: InklingModel
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    drafts: DraftBlocks | None = None
    block_draft: DFlashModel | None = None


def choose_device(name: str | None) -> torch.device:
    """The named device, else a GPU if torch sees one, else the CPU.

    Raises: ValueError: torch does not know it, or this machine has none.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from error
    return device


def choose_dtype(name: str, config: InklingConfig, device: torch.device) -> torch.dtype:
    """The named dtype; for "auto" the checkpoint's, on a CPU float32 (most multiply bf16 slowly).

    Raises: ValueError: an unknown name.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def rank_device(args: EngineArgs, rank: int) -> torch.device:
    """The device of one tensor-parallel rank: the chosen one, and on GPUs a GPU each.

    Raises: ValueError: fewer GPUs than ranks, or one GPU was named for several ranks.
    """
    if args.tp_size == 1:
        return choose_device(args.device)
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return choose_device(name)
    if index:
        raise ValueError(
            f"device {args.device!r} is one GPU, tensor parallel size {args.tp_size} needs as many;"
            " name the kind only, and choose GPUs with CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < args.tp_size:
        raise ValueError(
            f"tensor parallel size {args.tp_size} needs {args.tp_size} GPUs, this process sees "
            f"{torch.cuda.device_count()}"
        )
    return choose_device(f"cuda:{rank}")  # no other: a rank has no context on others' GPUs


def check_ranks(args: EngineArgs, rank: int = 0) -> InklingConfig:
    """The checkpoint's config, after making sure that its weights can be shared out as asked and
    that the rank has a device.

    Raises: ValueError: they cannot, or there are too few devices.
    """
    override = parse_override(args.json_model_override_args)
    path = Path(args.model_path).expanduser()
    if not (args.load_format == "dummy" and path.is_file()):  # a config.json is all a dummy needs
        path = resolve_model_path(args.model_path)
    config = load_config(path, override)
    rank_device(args, rank)
    rank_text(config.text, args.ranks)
    if args.ep_size > 1 and config.text.moe is None:
        raise ValueError(f"ep_size {args.ep_size}: every layer of this model is dense")
    weight_bytes(config, torch.bfloat16, args.ranks, args.ep_size > 1)
    draft_depths(args, config)
    block_draft(args, config)
    return config


def load_parts(args: EngineArgs, rank: int = 0) -> EngineParts:
    """Read config, weights and tokenizer, choose the ops.

    Args:   rank: the tensor-parallel rank whose shard to load.
    Raises: ValueError: the checkpoint or an argument is wrong (CheckpointError is one), or the
            weights do not fit.
    """
    config = check_ranks(args, rank)
    device = rank_device(args, rank)
    if device.index is not None and device.type == "cuda":  # else it is the current one already
        torch.cuda.set_device(device)
    expert_parallel = args.ep_size > 1
    dtype = choose_dtype(args.dtype, config, device)
    ops = resolve_ops(
        config,
        arch_of_device(device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=args.attention_backend,
        moe_runner_backend=args.moe_runner_backend,
        tp_size=args.ranks,
        ep_size=args.ep_size,
    )
    depths = draft_depths(args, config)
    parts: tuple[Part, ...] = ("text", "mtp") if depths else ("text",)
    draft_config = block_draft(args, config)
    _check_memory(config, args, dtype, device, parts, draft_config)
    shard: dict[str, Any] = {
        "tp_rank": rank,
        "tp_size": args.ranks,
        "expert_parallel": expert_parallel,
    }
    weights = allocate(config, dtype=dtype, device=device, parts=parts, **shard)
    if args.load_format == "dummy":
        fill_dummy(config, weights, seed=args.random_seed, **shard)
    else:
        load_weights(
            resolve_model_path(args.model_path), config, weights, progress=rank == 0, **shard
        )
    tokenizer = None if args.skip_tokenizer_init or rank else InklingTokenizer()
    logger.info("%s: %s on %s, rank %d of %d", args.model_path, dtype, device, rank, args.ranks)
    first_expert = None
    if expert_parallel:
        assert config.text.moe is not None
        first_expert = rank * (config.text.moe.num_experts // args.ranks)
    model = InklingModel(config, weights, ops, args.ranks, first_expert)
    return EngineParts(
        config=config,
        model=model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        drafts=DraftBlocks(model, weights, depths, args.ranks) if depths else None,
        block_draft=_load_block_draft(draft_config, args, dtype, device),
    )


def _load_block_draft(
    config: DFlashConfig | None, args: EngineArgs, dtype: torch.dtype, device: torch.device
) -> DFlashModel | None:
    if config is None:
        return None
    weights = allocate_dflash(config, dtype=dtype, device=device)
    path = args.speculative_draft_model_path
    assert path is not None
    if args.load_format == "dummy" or path == "demo":
        fill_dflash_dummy(config, weights, seed=args.random_seed)
    else:
        load_dflash_weights(resolve_model_path(path), config, weights, progress=False)
    return DFlashModel(config, weights)


def _check_memory(
    config: InklingConfig,
    args: EngineArgs,
    dtype: torch.dtype,
    device: torch.device,
    parts: tuple[Part, ...],
    draft: DFlashConfig | None,
) -> None:
    """Weights beyond a machine's memory would end in the kernel killing the process."""
    needed = weight_bytes(config, dtype, args.ranks, args.ep_size > 1, parts)
    needed += 0 if draft is None else dflash_bytes(draft, dtype)
    if device.type == "cpu":
        needed *= args.tp_size  # all ranks are on this machine
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"the weights need {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, but "
            f"{free / GIB:.1f} GiB are free on {device}"
        )
