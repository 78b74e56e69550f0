"""Every variant of an op on the tensors that a model's layers call it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from inkling_rocm.bench.layer import Case, LayerBench, watching
from inkling_rocm.bench.rows import machine
from inkling_rocm.bench.timing import call_us
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.ops.registry import OpContext, variants_of
from kernel_base.arch import arch_of_device


@torch.inference_mode()
def measure_variants(bench: LayerBench, args: EngineArgs, case: Case) -> Iterator[dict[str, Any]]:
    """Rows: us of a call, or the reason why a variant was not run."""
    parts = bench.parts
    context = OpContext(
        config=parts.config,
        arch=arch_of_device(parts.device),
        dtype=str(parts.dtype).removeprefix("torch."),
        tp_size=args.ranks,
    )
    calls: dict[str, tuple[tuple, dict]] = {}

    def remember(site: str, op: str, function: Callable, given: tuple, kwargs: dict) -> Any:
        # The last layer's: in Inkling a global, mixture-of-experts one.
        calls[op] = given, {name: value for name, value in kwargs.items() if name != "prepared"}
        return function(*given, **kwargs)

    forward = bench.prepare(case)
    with watching(parts.model, remember):
        forward()
    for op, (given, kwargs) in calls.items():
        for variant in variants_of(op):
            us, reason = None, variant.supports(context)
            if reason is None and variant.prepare is not None:
                reason = "wants prepared weights: measure it with `bench layer`"
            if reason is None:
                function = variant.load(context)
                us = call_us(partial(function, *given, **kwargs), parts.device)
            yield {
                "op": op,
                "case": case.name,
                "variant": variant.name,
                "us": None if us is None else round(us, 2),
                "reason": reason,
                "caches": "warm",
                "rank_slice": args.rank_slice,
                **machine(parts.device),
            }
