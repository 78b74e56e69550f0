"""The host interface: what a forward needs from whoever runs it (embedded engine or SGLang)."""

from inkling_rocm.host.meta import (
    CONV_STREAMS,
    BatchMeta,
    Comm,
    ConvStateView,
    ConvStream,
    ForwardKind,
    Host,
    KVCacheView,
    SingleRank,
)

__all__ = [
    "CONV_STREAMS",
    "BatchMeta",
    "Comm",
    "ConvStateView",
    "ConvStream",
    "ForwardKind",
    "Host",
    "KVCacheView",
    "SingleRank",
]
