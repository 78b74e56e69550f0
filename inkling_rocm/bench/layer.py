"""Time of a model's layers on one device, beside the least time their ops could take.

The floor of an op is the larger of its bytes over the memory rate and its FLOPs over the matrix
rate; a layer's floor is the sum over its ops. Bytes are what must move: inputs once, outputs once,
of the routed experts only those that the tokens chose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from inkling_rocm.bench.rows import ceilings
from inkling_rocm.bench.timing import eager_us, graph_us
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.compile_ahead import compiling_ahead, may_compile_ahead
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.host import SingleRank
from inkling_rocm.host.comm import RankSlice
from inkling_rocm.model import InklingModel
from inkling_rocm.model.layer import rank_text
from inkling_rocm.parity.watch import attach
from inkling_rocm.profile import torch_trace
from inkling_rocm.profile.traffic import call_bytes
from inkling_rocm.profile.window import PREFIX
from kernel_base.arch import arch_of_device

PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows` sequences that hold `context` tokens get `tokens` more each."""

    rows: int
    context: int
    tokens: int

    @property
    def name(self) -> str:
        if self.tokens == 1:
            return f"decode, batch {self.rows}, context {self.context}"
        return f"prefill {self.rows} x {self.tokens}, context {self.context}"

    def keys(self, window: int) -> int:
        """Keys that all queries see together."""
        seen = self.context + 1 + np.arange(self.tokens, dtype=np.int64)
        return self.rows * int((np.minimum(seen, window) if window else seen).sum())


@dataclass(kw_only=True)
class OpTotal:
    """One op over all layers of a forward: calls, least bytes, FLOPs, least and device time."""

    calls: int = 0
    bytes: int = 0
    flops: int = 0
    floor_us: float = 0.0
    us: float | None = None
    launches: int | None = None


@dataclass(kw_only=True)
class Measurement:
    """One case: us and floor_us are a layer's; ops by name are sums over all layers. `graph`: us
    is of a replayed graph. graph_us: of a graph too, where us is of launches."""

    case: Case
    layers: int
    us: float
    graph: bool
    graph_us: float | None = None
    floor_us: float | None
    ops: dict[str, OpTotal] = field(default_factory=dict)

    @property
    def over_floor(self) -> float | None:
        return self.us / self.floor_us if self.floor_us else None


class LayerBench:
    """The stack of layers of a model over pools filled with noise.

    Args:   parts: the model, or one rank's slice of it, see EngineArgs.rank_slice.
            cases: the sizes to make room for.
    Raises: ValueError: they do not fit into the memory.
    """

    def __init__(self, parts: EngineParts, args: EngineArgs, cases: Iterable[Case]):
        self.parts, self.cases = parts, tuple(cases)
        text = rank_text(parts.config.text, args.ranks)
        plan = plan_memory(text, args, dtype=parts.dtype, device=parts.device)
        pools, rings = build_pools(text, plan, dtype=parts.dtype, device=parts.device)
        for pool in pools:
            pool.storage.normal_()
        self.host = EmbeddedHost(
            text,
            pools,
            rings,
            max_tokens=max(case.rows * case.tokens for case in self.cases),
            max_rows=max(case.rows for case in self.cases),
            device=parts.device,
            comm=SingleRank() if args.rank_slice is None else RankSlice(args.rank_slice),
        )
        self._ceilings = ceilings(arch_of_device(parts.device))

    @torch.inference_mode()
    def measure(self, cases: Iterable[Case]) -> Iterator[Measurement]:
        """Times of the cases, all of them before the first is profiled: once a profiler has been
        attached, every later launch of the process is slower, 1.5 us on an H200. Bars on stderr say
        how far it is."""
        cases = tuple(cases)
        self._compile(cases)
        found = [self._timed(case) for case in tqdm(cases, desc="timing", unit="case")]
        on_gpu, layers = self.parts.device.type == "cuda", len(self.parts.model.layers)
        bar = tqdm(found, desc="op by op", unit="case")
        for one in bar:
            one.ops = self._ops(one.case, self.prepare(one.case), on_gpu=on_gpu)
            one.floor_us = sum(op.floor_us for op in one.ops.values()) / layers or None
            bar.clear()  # what the caller prints begins a line
            yield one

    def _compile(self, cases: tuple[Case, ...]) -> None:
        """Have the kernels of all cases compiled side by side."""
        if self.parts.device.type == "cpu" or not may_compile_ahead(self.parts.model.ops):
            return
        with compiling_ahead():
            for case in cases:
                self.prepare(case)()

    def _timed(self, case: Case) -> Measurement:
        on_gpu, layers = self.parts.device.type == "cuda", len(self.parts.model.layers)
        forward = self.prepare(case)
        forward()
        graph = on_gpu and case.tokens == 1
        graphed = None
        if graph:
            us = _rested(lambda: graph_us(forward)) / layers
        else:
            us = _rested(lambda: eager_us(forward, on_gpu=on_gpu)) / layers
            if on_gpu:
                graphed = _rested(lambda: graph_us(forward)) / layers
        return Measurement(
            case=case, layers=layers, us=us, graph=graph, floor_us=None, graph_us=graphed
        )

    def prepare(self, case: Case) -> Callable[[], Any]:
        """Lay the case out; returns a forward through the layers."""
        model, host = self.parts.model, self.host
        slots = np.arange(1, case.rows + 1, dtype=np.int64)
        for pool in host.pools:
            for slot in slots.tolist():
                pool.release(slot)
            for slot in slots.tolist():
                pool.trim(slot, case.context)
                if pool.window:  # only the pages that the window reaches are there
                    first = max(case.context - (pool.window - 1), 0) // pool.page_size
                    pool.first[slot] = pool.end[slot] = first
                if pool.missing(slot, case.context + case.tokens) > pool.free:
                    raise ValueError(
                        f"{case.name}: the {pool.name} pool has too few pages; raise "
                        "mem_fraction_static or max_total_tokens, or measure less"
                    )
                pool.extend(slot, case.context + case.tokens)
            pool.take_changes(slots)
        lengths = np.full(case.rows, case.tokens, np.int64)
        host.prepare(slots, np.full(case.rows, case.context, np.int64), lengths)
        shape = (case.rows * case.tokens, model.config.text.hidden_size)
        noise = torch.Generator(self.parts.device).manual_seed(0)
        x_TH = torch.randn(shape, generator=noise, device=self.parts.device).to(self.parts.dtype)

        def forward() -> Tensor:
            normed_TH, residual_TH = x_TH, x_TH
            host.meta.memo.clear()
            for layer, norm_H in zip(model.layers, model.next_norms, strict=True):
                normed_TH, residual_TH = layer.forward(normed_TH, residual_TH, norm_H, host)
            return normed_TH

        return forward

    def _ops(self, case: Case, forward: Callable[[], Any], *, on_gpu: bool) -> dict[str, OpTotal]:
        """Every op's traffic, floor and time, from eager forwards: one counted, one profiled."""
        found: dict[str, OpTotal] = {}
        rate, flop_rate, _ = self._ceilings

        def count(site: str, op: str, function: Callable, args: tuple, kwargs: dict) -> Any:
            result = function(*args, **kwargs)
            total = found.setdefault(op, OpTotal())
            moved = call_bytes(op, args, kwargs, result)
            if op == "experts":
                moved = _expert_bytes(moved, args, kwargs)
            flops = _flops(op, args, kwargs, case, self.parts.model)
            total.calls += 1
            total.bytes += moved
            total.flops += flops
            if rate:
                total.floor_us += max(moved / rate, flops / flop_rate) * 1e6
            return result

        def mark(site: str, op: str, function: Callable, args: tuple, kwargs: dict) -> Any:
            with torch.profiler.record_function(PREFIX + op):
                result = function(*args, **kwargs)
                if on_gpu:  # so that its kernels also run while the range lasts
                    torch.cuda.synchronize()
            return result

        with watching(self.parts.model, count):
            forward()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=kinds, acc_events=True)
        with watching(self.parts.model, mark), profiler:
            forward()
            if on_gpu:
                torch.cuda.synchronize()
        for row in torch_trace.op_rows(profiler.events(), on_device=on_gpu):
            if row.op in found:
                found[row.op].us, found[row.op].launches = row.us, row.launches
        return found


def _rested(measure: Callable[[], float]) -> float:
    """A measurement after a pause: the clock that heavy work has lowered comes back."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
    return measure()


class watching:
    """Context in which a model's op calls go through `listener`."""

    def __init__(self, model: InklingModel, listener: Callable):
        self._model, self._listener = model, listener

    def __enter__(self) -> None:
        self._before = [dict(vars(layer)) for layer in self._model.layers]
        self._ops = self._model.ops
        attach(self._model, self._listener)

    def __exit__(self, *exception: object) -> None:
        self._model.ops = self._ops
        for layer, before in zip(self._model.layers, self._before, strict=True):
            vars(layer).update(before)


def _expert_bytes(upper: int, args: tuple, kwargs: dict) -> int:
    """call_bytes counts every choice as another expert; here those that were really chosen."""
    w13, w2 = kwargs["w13"], kwargs["w2"]
    if w13 is None:
        return upper
    X = w13.shape[0]
    each = (w13.nbytes + w2.nbytes) / X
    counted = int((w13.nbytes + w2.nbytes) * min(args[1].numel() / X, 1.0))
    chosen = args[1].unique() - kwargs.get("first_expert", 0)
    return upper - counted + int(each * int(((chosen >= 0) & (chosen < X)).sum()))


def _flops(op: str, args: tuple, kwargs: dict, case: Case, model: InklingModel) -> int:
    """Of the matrix products; the rest is noise beside the bytes."""
    if op in ("linear", "gate"):
        return 2 * args[0].shape[0] * args[1].numel()
    if op == "dense_mlp":
        return 2 * args[0].shape[0] * (args[1].numel() + args[2].numel())
    if op == "experts":
        moe, T = model.config.text.moe, args[0].shape[0]
        assert moe is not None
        shared = [kwargs["shared_w13"], kwargs["shared_w2"]]
        if shared[0] is None:
            return 0
        of_one = (shared[0].numel() + shared[1].numel()) // moe.num_shared_experts
        return 2 * T * of_one * (moe.top_k + moe.num_shared_experts)
    if op == "rel_attention":
        attention = kwargs["attention"]
        return 4 * attention.num_heads * attention.head_dim * case.keys(attention.window)
    return 0
