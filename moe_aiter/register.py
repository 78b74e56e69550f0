"""The launchers of this package in the kernel register, with the cases that prove each tuning row.

A case runs one launcher with the row forced, on a small model with the row's real tiles: sizes just
past a tile in every direction, so that partial tiles and their masks are executed, and once aligned
as the models' sizes are: unmasked depths, 16-byte loads. fp32 rows get fp32 problems.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from kernel_base.arch import arch_named
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow, TuningTable
from moe_aiter import tuning
from moe_aiter.combine import combine
from moe_aiter.gate import gate
from moe_aiter.grouped import experts_by_choice, experts_looked_up
from moe_aiter.problems import Problem, make_gate_problem, make_problem
from moe_aiter.reference import gate_reference
from moe_aiter.routing import sort_choices
from moe_aiter.tokens import experts_by_token

ROUTE_SCALE = 8.0


def _dtype(row: TuningRow) -> torch.dtype:
    return torch.float32 if row.when.get("bits") == 32 else torch.bfloat16


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def _companion(row: TuningRow, own: TuningTable, other: TuningTable) -> TuningRow:
    """The other product's row for the same facts (the tables list them in the same order)."""
    return other.for_arch(row.arch)[own.for_arch(row.arch).index(row)]


def _same_bits(row: TuningRow, other: TuningTable) -> TuningRow:
    """Some row of the other product for the same dtype."""
    same = (r for r in other.for_arch(row.arch) if r.when.get("bits") == row.when.get("bits"))
    return next(same)


def _outcome(problem: Problem, out: torch.Tensor) -> list[Outcome]:
    return [
        Outcome(
            name="out",
            out=out,
            reference=problem.reference(),
            eager=problem.reference(problem.x.dtype),
        )
    ]


def _depth(rows: Iterable[TuningRow]) -> int:
    """A multiple of both rows' tile depth: 16 elements divide every stride."""
    return max(int(row.constexprs["BLOCK_K"]) for row in rows)


def _few_tokens(row: TuningRow) -> bool:
    bound = row.when.get("tokens")
    return isinstance(bound, tuple) and bound[1] is not None and bound[1] <= 16


def _by_token(arch, rows, few, aligned, dtype, device) -> list[Outcome]:
    tokens = 5 if few else 65
    # Ragged: just past a tile. Aligned: whole tiles of depth in both products.
    hidden, width = (_depth(rows), _depth(rows)) if aligned else (136 if few else 72, 72)
    problem = make_problem(tokens, hidden=hidden, width=width, dtype=dtype, device=device)
    ids, gamma = (problem.ids, problem.gamma) if few else (None, problem.gamma[:, 3:])
    weights = dict(problem.weights)
    if not few:
        weights |= {"w13": None, "w2": None}
        problem.ids.fill_(-1)  # the reference is the shared experts' alone
    out = experts_by_token(
        problem.x, ids, gamma, **weights, out=_poisoned(problem.x), arch=arch_named(arch), rows=rows
    )  # fmt: skip
    return _outcome(problem, out)


def _by_choice(launch, arch, rows, aligned, dtype, device) -> list[Outcome]:
    hidden, width = (_depth(rows), _depth(rows)) if aligned else (136, 72)
    problem = make_problem(40, experts=5, hidden=hidden, width=width, dtype=dtype, device=device)
    out = launch(
        problem.x, problem.ids, problem.gamma, **problem.weights, out=_poisoned(problem.x),
        arch=arch_named(arch), rows=rows,
    )  # fmt: skip
    return _outcome(problem, out)


def _token_cases(first: bool, arch: str, row: TuningRow) -> Iterable[Case]:
    mate = _same_bits(row, tuning.DOWN_TOKENS if first else tuning.SWIGLU_TOKENS)
    rows = (row, mate) if first else (mate, row)
    few = _few_tokens(row)
    name = "routed and shared" if few else "shared, two row blocks"
    for aligned in (False, True):
        yield Case(
            name=f"{name}, {'aligned' if aligned else 'ragged'}",
            run=partial(_by_token, arch, rows, few, aligned, _dtype(row)),
        )


def _choice_cases(launch, tables, first: bool, arch: str, row: TuningRow) -> Iterable[Case]:
    own, other = tables if first else tables[::-1]
    mate = _companion(row, own, other)
    for aligned in (False, True):
        yield Case(
            name=f"shared experts folded in, {'aligned' if aligned else 'ragged'}",
            run=partial(
                _by_choice,
                launch,
                arch,
                (row, mate) if first else (mate, row),
                aligned,
                _dtype(row),
            ),
        )


def _run_gate(arch, rows, tokens, dtype, device, hidden=200) -> list[Outcome]:
    p = make_gate_problem(tokens, hidden=hidden, dtype=dtype, device=device)
    arguments = (p.x, p.weight, p.bias, p.global_scale)
    weights = torch.full((tokens, 6), float("nan"), device=device)
    ids, weights = gate(
        *arguments, top_k=4, route_scale=ROUTE_SCALE, weights_out=weights, arch=arch, rows=rows
    )
    want_ids, want = gate_reference(*arguments, top_k=4, route_scale=ROUTE_SCALE)
    _, eager = gate_reference(*arguments, top_k=4, route_scale=ROUTE_SCALE, dtype=torch.float32)
    return [
        Outcome(name="ids", out=ids, reference=want_ids, eager=want_ids),
        Outcome(name="weights", out=weights, reference=want, eager=eager),
    ]


def _router_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    tokens = 5 if _few_tokens(row) else 37
    run = partial(_run_gate, arch, (row, None), tokens, _dtype(row))
    yield Case(name=f"T={tokens}, ragged", run=run)
    # Two whole slices, or one where a slice is the whole depth.
    hidden = min(2 * int(row.constexprs["SLICE"]), 1024)
    yield Case(name=f"T={tokens}, aligned", run=partial(run, hidden=hidden))


def _select_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="T=19", run=partial(_run_gate, arch, (None, row), 19, torch.bfloat16))


def sort_reference(ids: torch.Tensor, experts: int, first_expert: int = 0) -> torch.Tensor:
    """Flat choice numbers of local experts, by expert, each in original order."""
    flat = ids.flatten() - first_expert
    local = ((flat >= 0) & (flat < experts)).nonzero().flatten()
    return local[flat[local].sort(stable=True).indices].int()


def _run_sort(arch, row, device) -> list[Outcome]:
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, 12, (211, 3), dtype=torch.int32, device=device, generator=generator)
    order = sort_choices(
        ids, num_experts=7, block_m=16, first_expert=2, arch=arch_named(arch), row=row
    )
    want = sort_reference(ids, 7, 2)
    return [Outcome(name="choice", out=order.choice[: len(want)], reference=want, eager=want)]


def _sort_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="633 choices, 7 of 12 experts", run=partial(_run_sort, arch, row))


def _run_combine(arch, row, device) -> list[Outcome]:
    generator = torch.Generator(device).manual_seed(1)
    partial_rows = torch.randn(5 * 4, 2056, device=device, generator=generator).bfloat16()
    addend = torch.randn(5, 2056, device=device, generator=generator).bfloat16()
    ids = torch.arange(15, dtype=torch.int32, device=device).view(5, 3)
    partial_rows[:3] = float("nan")  # choices of experts elsewhere are never read
    out = combine(
        _poisoned(addend), partial_rows, addend, ids, first_expert=3, num_experts=12, shared=1,
        arch=arch_named(arch), row=row,
    )  # fmt: skip

    def total(dtype):
        routed = partial_rows[:15].nan_to_num(0.0).to(dtype).view(5, 3, -1).sum(1)
        return routed + partial_rows[15:].to(dtype) + addend.to(dtype)

    return [
        Outcome(name="out", out=out, reference=total(torch.float64), eager=total(torch.bfloat16))
    ]


def _combine_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="three choices, one shared, one addend", run=partial(_run_combine, arch, row))


_SORTED = partial(_choice_cases, experts_by_choice, (tuning.SWIGLU_GROUPED, tuning.DOWN_GROUPED))
_LOOKED_UP = partial(_choice_cases, experts_looked_up, (tuning.SWIGLU_LOOKUP, tuning.DOWN_LOOKUP))


def _entry(table: TuningTable, kernels: str, cases) -> KernelEntry:
    names = tuple(kernels.split())
    return register(KernelEntry(name=table.kernel, kernels=names, table=table, cases=cases))


ENTRIES = (
    _entry(
        tuning.SWIGLU_TOKENS,
        "moe_aiter.tokens:_swiglu_tokens_kernel",
        partial(_token_cases, True),
    ),
    _entry(
        tuning.DOWN_TOKENS,
        "moe_aiter.tokens:_down_tokens_kernel",
        partial(_token_cases, False),
    ),
    _entry(
        tuning.SWIGLU_GROUPED,
        "moe_aiter.grouped:_swiglu_grouped_kernel moe_aiter.hopper:_hopper_grouped_kernel",
        partial(_SORTED, True),
    ),
    _entry(
        tuning.DOWN_GROUPED,
        "moe_aiter.grouped:_down_grouped_kernel moe_aiter.hopper:_hopper_grouped_kernel",
        partial(_SORTED, False),
    ),
    _entry(
        tuning.SWIGLU_LOOKUP,
        "moe_aiter.grouped:_swiglu_grouped_kernel",
        partial(_LOOKED_UP, True),
    ),
    _entry(
        tuning.DOWN_LOOKUP,
        "moe_aiter.grouped:_down_grouped_kernel",
        partial(_LOOKED_UP, False),
    ),
    _entry(tuning.COMBINE, "moe_aiter.combine:_combine_kernel", _combine_cases),
    _entry(
        tuning.SORT,
        "moe_aiter.routing:_sort_kernel moe_aiter.routing:_rank_kernel"
        " moe_aiter.routing:_scan_kernel moe_aiter.routing:_place_kernel",
        _sort_cases,
    ),
    _entry(
        tuning.ROUTER,
        "moe_aiter.gate_router:_router_kernel moe_aiter.router_hopper:_router_hopper_kernel",
        _router_cases,
    ),
    _entry(tuning.SELECT, "moe_aiter.gate_select:_select_kernel", _select_cases),
)
