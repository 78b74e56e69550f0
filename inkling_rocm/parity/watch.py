"""Watching a model's ops from outside: which op of which layer ran, on what, with what result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.host import BatchMeta, ConvStateView, KVCacheView
from inkling_rocm.model import InklingModel
from inkling_rocm.ops.registry import OP_NAMES, OpSet

# What a layer keeps for itself, possibly with its prepared weights (model/layer.py).
LAYER_OPS = ("rel_attention", "gate", "experts")
# Called with the site ("1.attn.o_proj"), the op's name, the op, its arguments: runs the op and
# returns its result.
Listener = Callable[[str, str, Callable, tuple, dict[str, Any]], Any]


class Sites:
    """Names the calls of one forward in the order in which layer.py makes them."""

    def __init__(self) -> None:
        self._halves = 0  # halves of layers that are done: each ends in a residual_conv_norm
        self._linears = 0

    def name(self, op: str) -> str:
        """The site of the next call of `op`."""
        if op in ("embed", "rms_norm"):
            self._halves = self._linears = 0
            return f"stem.{op}"
        if op == "lm_head":
            return "head.lm_head"
        layer, half = divmod(self._halves, 2)
        if op == "residual_conv_norm":
            self._halves += 1
        if op == "linear":
            self._linears += 1
            op = "qkvr" if self._linears % 2 else "o_proj"
        return f"{layer}.{('attn', 'mlp')[half]}.{op}"


class _Watcher:
    def __init__(self, listener: Listener) -> None:
        self._sites, self._listener = Sites(), listener

    def watch(self, name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._listener(self._sites.name(name), name, function, args, kwargs)

        return call

    def ops(self, ops: OpSet) -> OpSet:
        functions = {name: self.watch(name, getattr(ops, name)) for name in OP_NAMES}
        return OpSet(functions, ops.choices, ops.prepares)


def watched(ops: OpSet, listener: Listener) -> OpSet:
    """`ops` with every call going through `listener`."""
    return _Watcher(listener).ops(ops)


def attach(model: InklingModel, listener: Listener) -> None:
    """Let every op call of a model that is already built go through `listener`, those its layers
    have bound prepared weights to as well."""
    watcher = _Watcher(listener)
    model.ops = watcher.ops(model.ops)
    for layer in model.layers:
        layer.ops = model.ops
        for name in LAYER_OPS:
            setattr(layer, name, watcher.watch(name, getattr(layer, name)))


def outputs(result: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a call produced: its results by number, and the state it may have written: the pages'
    rows of its tokens and the rings, without the sinks."""
    results = result if isinstance(result, tuple) else (result,)
    found = {str(i): tensor for i, tensor in enumerate(results)}
    for name, value in kwargs.items():
        if isinstance(value, KVCacheView):
            slots = value.slot[value.slot > 0]
            for side, pool in (("k", value.k), ("v", value.v)):
                found[side] = pool.flatten(0, 1)[slots]
        elif isinstance(value, ConvStateView):
            found[name] = value.state[1:]
    return found


def copied(value: Any, dtype: torch.dtype | None) -> Any:
    """A copy of an op's argument that shares nothing writable with it, floats as `dtype` (None =
    their own). Index tensors and configurations are shared."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        return value.clone() if dtype is None else value.to(dtype)
    if isinstance(value, KVCacheView):
        return replace(value, k=copied(value.k, dtype), v=copied(value.v, dtype))
    if isinstance(value, ConvStateView):
        return replace(value, state=copied(value.state, dtype))
    if isinstance(value, BatchMeta):
        return replace(value, memo={})
    return value
