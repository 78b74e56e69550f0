"""From arguments to a model that can run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inkling_rocm.checkpoint.demo import resolve_model_path
from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.loader import load_weights
from inkling_rocm.checkpoint.table import allocate, weight_bytes
from inkling_rocm.config import InklingConfig, load_config
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.memory import GIB, free_bytes
from inkling_rocm.engine.tokenizer import InklingTokenizer, Tokenizer
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_of_device

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    config: InklingConfig
    model: InklingModel
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device


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


def load_parts(args: EngineArgs) -> EngineParts:
    """Read config, weights and tokenizer, choose the ops.

    Raises: ValueError: the checkpoint or an argument is wrong (CheckpointError is one), or the
            weights do not fit.
    """
    path = resolve_model_path(args.model_path)
    config = load_config(path)
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, config, device)
    ops = resolve_ops(
        config,
        arch_of_device(device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=args.attention_backend,
        moe_runner_backend=args.moe_runner_backend,
    )
    _check_memory(config, dtype, device)
    weights = allocate(config, dtype=dtype, device=device)
    if args.load_format == "dummy":
        fill_dummy(config, weights, seed=args.random_seed)
    else:
        load_weights(path, config, weights)
    tokenizer = None if args.skip_tokenizer_init else InklingTokenizer()
    logger.info("%s: %s on %s", args.model_path, dtype, device)
    return EngineParts(
        config=config,
        model=InklingModel(config, weights, ops),
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
    )


def _check_memory(config: InklingConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Weights beyond a machine's memory would end in the kernel killing the process."""
    needed, free = weight_bytes(config, dtype), free_bytes(device)
    if needed > free:
        raise ValueError(
            f"the weights need {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, but "
            f"{free / GIB:.1f} GiB are free on {device}"
        )
