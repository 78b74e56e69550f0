"""Shared-sink mixture of experts: gate, routed and shared experts, dense MLP; Triton kernels and
aiter calls."""

from moe_aiter.dense import dense_mlp
from moe_aiter.experts import experts
from moe_aiter.gate import GateWorkspace, gate

__all__ = ["GateWorkspace", "dense_mlp", "experts", "gate"]
