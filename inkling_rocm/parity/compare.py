"""Comparing one target with the reference, op by op.

Every output of every op has two errors, both relative norms against float64:

own   the target's whole run beside a float64 run of the same weights: rounding as it accumulates.
same  the op alone: the float64 reference op on exactly the inputs (and state) the target's op got.

The choice of experts is judged by its scores, and followed by the reference runs: routing.py.
Each has a budget, twice what the torch reference op does in the model's dtype on the same path plus
a few roundings. An op that is wrong shows in `same` at its own site and nowhere before; `own`
spreads from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.model.layer import EXPERT_WEIGHTS
from inkling_rocm.ops.registry import OpSet
from inkling_rocm.parity.problems import Problem
from inkling_rocm.parity.routing import is_choice, scores_of, shortfall, weights_of
from inkling_rocm.parity.run import Target, engine_tokens, make_weights, run_forwards
from inkling_rocm.parity.watch import copied, outputs

ROUNDINGS = 4  # of the dtype, allowed on top of twice the eager error

Key = tuple[int, str, str]  # forward, site, output


@dataclass(frozen=True, kw_only=True)
class Site:
    """Errors and budgets of one output of one op call."""

    forward: int
    site: str
    output: str
    own: float
    own_budget: float
    same: float
    same_budget: float

    @property
    def own_ok(self) -> bool:
        """A NaN fails."""
        return self.own <= self.own_budget

    @property
    def same_ok(self) -> bool:
        return self.same <= self.same_budget


@dataclass(kw_only=True)
class Comparison:
    """One problem in one dtype on one target.

    Attributes:
        sites: in the order of execution.
        tokens: of the whole engine on the target; want_tokens: on the CPU reference.
        kept: what every op gave on the target, on the CPU.
        scores: what float64's gates select by, [T, X] of every forward and site.
    """

    problem: str
    dtype: str
    target: str
    sites: list[Site] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    want_tokens: list[list[int]] = field(default_factory=list)
    kept: dict[Key, Tensor] = field(default_factory=dict)
    scores: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    @property
    def tokens_equal(self) -> bool:
        return self.tokens == self.want_tokens

    @property
    def passed(self) -> bool:
        """bf16 tokens may differ: a near tie is enough."""
        tokens = self.tokens_equal or self.dtype != "float32"
        return tokens and all(site.own_ok and site.same_ok for site in self.sites)

    def first_fault(self) -> Site | None:
        """The first op that is wrong on its own inputs; else the first that left its budget."""
        alone = next((site for site in self.sites if not site.same_ok), None)
        return alone or next((site for site in self.sites if not site.own_ok), None)

    def as_json(self) -> dict[str, Any]:
        fault = self.first_fault()
        return {
            "problem": self.problem,
            "dtype": self.dtype,
            "target": self.target,
            "passed": self.passed,
            "tokens_equal": self.tokens_equal,
            "first_fault": None if fault is None else asdict(fault),
            "tokens": self.tokens,
            "sites": [asdict(site) for site in self.sites],
        }


def error_of(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference; of integers, the part that differs. NaN stays NaN."""
    got, want = got.cpu(), want.cpu()
    if got.shape != want.shape:
        return float("nan")
    if not got.is_floating_point():
        return float((got != want).double().mean()) if got.numel() else 0.0
    difference = (got.double() - want.double()).norm()
    norm = want.double().norm()
    return float(difference if norm == 0 else difference / norm)


def budget_of(eager: float, dtype: torch.dtype) -> float:
    return 2 * eager + ROUNDINGS * torch.finfo(dtype).eps


def reference_op(name: str) -> Callable:
    """The torch reference of an op: the function its module is named after."""
    return getattr(import_module(f"inkling_rocm.ops.{name}"), name)


class _Own:
    """A listener that keeps every output."""

    def __init__(self) -> None:
        self.kept: dict[Key, Tensor] = {}
        self.forward = -1

    def __call__(self, site: str, op: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if op == "embed":
            self.forward += 1
        result = function(*args, **kwargs)
        for name, tensor in outputs(result, args, kwargs).items():
            # A copy: state goes on changing.
            self.kept[self.forward, site, name] = tensor.detach().cpu().clone()
        return result


class _Following(_Own):
    """Keeps a reference run's outputs, its experts those that another run chose.

    Attributes: scores: what the gates would have selected by, of every forward and site.
    """

    def __init__(self, kept: dict[Key, Tensor]) -> None:
        super().__init__()
        self._leader = kept
        self.scores: dict[tuple[int, str], Tensor] = {}

    def __call__(self, site: str, op: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        result = super().__call__(site, op, function, args, kwargs)
        if op != "gate":
            return result
        scores_TX = self.scores[self.forward, site] = scores_of(args, kwargs)
        ids_TK = self._leader[self.forward, site, "0"]
        if math.isnan(shortfall(scores_TX, ids_TK)):  # no experts: a fault of the leader's
            return result
        weights = weights_of(ids_TK, args, kwargs)
        self.kept[self.forward, site, "1"] = weights.clone()
        return ids_TK, weights


class _Same(_Own):
    """Also runs the reference op on the same inputs, in float64 and in the model's dtype."""

    def __init__(self, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.weights, self.dtype = weights, dtype
        self.errors: dict[Key, tuple[float, float]] = {}

    def __call__(self, site: str, op: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "prepared"}
        for name in EXPERT_WEIGHTS if op == "experts" else ():
            if given[name] is None:  # a variant took it over
                given[name] = self.weights[f"layers.{site.split('.')[0]}.moe.{name}"]
        exact, eager = (self._reference(op, args, given, dtype) for dtype in (torch.float64, None))
        scores_TX = scores_of(args, kwargs) if op == "gate" else None
        result = super().__call__(site, op, function, args, kwargs)
        for name in exact:
            got = self.kept[self.forward, site, name]
            if scores_TX is not None and is_choice(site, name):
                error, allowed = (shortfall(scores_TX, ids) for ids in (got, eager[name]))
            else:
                error, allowed = error_of(got, exact[name]), error_of(eager[name], exact[name])
            self.errors[self.forward, site, name] = (error, budget_of(allowed, self.dtype))
        return result

    def _reference(self, op: str, args: tuple, kwargs: dict, dtype) -> dict[str, Tensor]:
        args = tuple(copied(value, dtype) for value in args)
        kwargs = {name: copied(value, dtype) for name, value in kwargs.items()}
        return outputs(reference_op(op)(*args, **kwargs), args, kwargs)


def compare(
    problem: Problem, target: Target, dtype: torch.dtype, *, ops: OpSet | None = None
) -> Comparison:
    """Run `problem` on `target` and on the CPU reference.

    Args: ops: instead of the target's own (a test plants a fault in them).
    """
    cpu = Target.named("cpu")
    name = str(dtype).removeprefix("torch.")
    weights = make_weights(problem, dtype, cpu.device)
    on_target = make_weights(problem, dtype, target.device)
    ours = _Same(on_target, dtype)
    found = Comparison(problem=problem.name, dtype=name, target=target.name)
    with target.running():
        run_forwards(problem, target, on_target, dtype, ours, ops)
        if ops is None:
            found.tokens = engine_tokens(problem, target, on_target, dtype)
            found.want_tokens = engine_tokens(problem, cpu, weights, dtype)
    exact, eager = _Following(ours.kept), _Following(ours.kept)
    wide = {key: w.double() for key, w in weights.items()}
    run_forwards(problem, cpu, wide, torch.float64, exact)
    run_forwards(problem, cpu, weights, dtype, eager)
    for key in ours.kept:
        forward, site, output = key
        if is_choice(site, output):
            scores = exact.scores[forward, site]
            own, allowed = (shortfall(scores, run.kept[key]) for run in (ours, eager))
        else:
            own, allowed = (error_of(run.kept[key], exact.kept[key]) for run in (ours, eager))
        same, same_budget = ours.errors[key]
        found.sites.append(
            Site(
                forward=forward, site=site, output=output, own=own,
                own_budget=budget_of(allowed, dtype), same=same, same_budget=same_budget,
            )
        )  # fmt: skip
    found.scores = exact.scores
    found.kept = ours.kept
    return found
