"""The op interface: contracts, torch references, variants and their choice."""

from inkling_rocm.ops.registry import OP_NAMES, OpContext, OpSet, Variant, resolve_ops

__all__ = ["OP_NAMES", "OpContext", "OpSet", "Variant", "resolve_ops"]
