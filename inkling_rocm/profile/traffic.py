"""The least bytes an op call must move: every input it needs read once, every output written once.

Counted from shapes alone, so that nothing waits for the device. Two counts are upper bounds: keys
as if every row were as long as the longest, experts as if all choices were different.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from inkling_rocm.host import ConvStateView, KVCacheView


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(map(_bytes, value))
    return 0


def call_bytes(op: str, args: tuple, kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes of one call of an op of ops/registry.py."""
    if op == "embed":  # rows of the table, read and written
        return 2 * _bytes(result)
    if op == "experts":
        return _experts(args, kwargs, result)
    total = sum(map(_bytes, args)) + _bytes(result)
    for value in kwargs.values():
        if isinstance(value, KVCacheView):
            each = 2 * value.k.shape[2] * value.k.shape[3] * value.k.element_size()
            tokens = value.slot.numel()
            if op == "rel_attention":
                meta = kwargs["meta"]
                keys = min(meta.max_kv, value.window + meta.max_q) if value.window else meta.max_kv
                tokens = meta.num_rows * keys
            total += tokens * each
        elif isinstance(value, ConvStateView):  # the history read, the new rows written
            row = value.state.shape[2] * value.state.element_size()
            total += 2 * value.slot.numel() * value.state.shape[1] * row
        else:
            total += _bytes(value)
    return total


def _experts(args: tuple, kwargs: Mapping[str, Any], result: Any) -> int:
    x_TH, topk_ids = args[0], args[1]
    weights = kwargs["w13"], kwargs["w2"]
    if weights[0] is None:  # the variant's own layout has as many bytes, but only it knows them
        return 2 * _bytes(x_TH)
    share = min(topk_ids.numel() / max(weights[0].shape[0], 1), 1.0)
    routed = sum(map(_bytes, weights)) * share
    shared = _bytes(kwargs["shared_w13"]) + _bytes(kwargs["shared_w2"])
    return int(routed) + shared + sum(map(_bytes, args)) + _bytes(result)
