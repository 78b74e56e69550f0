"""The embedded host: page pools, rings, scheduler, sampler, Python API."""

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.engine import Engine
from inkling_rocm.engine.handle import RequestHandle
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats, NoMetrics
from inkling_rocm.engine.request import (
    FinishReason,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Update,
)

__all__ = [
    "Engine",
    "EngineArgs",
    "EngineMetrics",
    "EngineStats",
    "FinishReason",
    "NoMetrics",
    "RequestError",
    "RequestHandle",
    "SamplingParams",
    "TokenLogprob",
    "Update",
]
