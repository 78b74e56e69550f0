"""Small problems of the layer kernels, for the kernel register, the tests and the benchmark.

A problem is data on the CPU; `run_*` copies it to a device (or widens it to float64), calls an
implementation of the op on the copy, and returns every tensor the op must produce or change. All
memory that must not be read is NaN; what is NaN afterwards becomes MISSING, so that a value in the
wrong place differs as a wrong value does (MISSING is no larger than the data: the budget of an
error grows with the largest value).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import BatchMeta, ConvStateView, KVCacheView, SingleRank

MISSING = 4.0
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Row:
    """`length` tokens from position `start` of the request in ring slot `slot`; 0 = padding.

    snapshot: boundary of a snapshot to a slot of its own, or None. history: usable ring rows, None
    = all there can be. skipped: first tokens of the row that have no K/V slot.
    """

    slot: int
    start: int
    length: int
    snapshot: int | None = None
    history: int | None = None
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A batch of rows, without channels."""

    rows: tuple[Row, ...]
    meta: BatchMeta
    slot: Tensor
    token_slot: Tensor
    history: Tensor
    snapshot_slot: Tensor | None
    snapshot_position: Tensor | None
    ring_slots: int

    def on(self, device: torch.device) -> Layout:
        """A copy on a device, with a memo of its own."""
        names = ("positions", "cu_seqlens_q", "q_start", "kv_len", "token_row")
        meta = replace(
            self.meta, memo={}, **{name: getattr(self.meta, name).to(device) for name in names}
        )
        names = ("slot", "token_slot", "history", "snapshot_slot", "snapshot_position")
        moved = {name: getattr(self, name) for name in names}
        moved = {name: None if x is None else x.to(device) for name, x in moved.items()}
        return replace(self, meta=meta, **moved)


def make_layout(rows: Sequence[Row], taps: int = 4) -> Layout:
    """Tokens get flat K/V slots in random order, from 1 on."""
    lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
    start = torch.tensor([row.start for row in rows], dtype=torch.int32)
    cu = torch.cat((lengths.new_zeros(1), lengths.cumsum(0).int()))
    T, B = int(cu[-1]), len(rows)
    token_row = torch.arange(B, dtype=torch.int32).repeat_interleave(lengths)
    in_chunk = torch.arange(T, dtype=torch.int32) - cu[token_row]
    slot = torch.tensor([row.slot for row in rows], dtype=torch.int32)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(7)) + 1
    skipped = torch.tensor([row.skipped for row in rows])
    live = (slot[token_row] != 0) & (in_chunk >= skipped[token_row])
    wanted = [row.snapshot is not None for row in rows]
    first = 1 + int(slot.max())
    uniform = len(set(lengths.tolist())) == 1
    return Layout(
        rows=tuple(rows),
        meta=BatchMeta(
            kind="prefill", num_rows=B, num_tokens=T,
            q_uniform=int(lengths[0]) if uniform else 0,
            max_q=int(lengths.max()), max_kv=int((start + lengths).max()),
            positions=start[token_row] + in_chunk, cu_seqlens_q=cu, q_start=start,
            kv_len=start + lengths, token_row=token_row,
        ),
        slot=slot,
        token_slot=torch.where(live, order, 0),
        history=torch.tensor(
            [min(r.start, taps - 1) if r.history is None else r.history for r in rows],
            dtype=torch.int32,
        ),
        snapshot_slot=torch.tensor(
            [first + b if wanted[b] else 0 for b in range(B)], dtype=torch.int32
        ) if any(wanted) else None,
        snapshot_position=torch.tensor(
            [row.snapshot or 0 for row in rows], dtype=torch.int32
        ) if any(wanted) else None,
        ring_slots=first + B,
    )  # fmt: skip


def make_state(layout: Layout, ring_len: int, channels: int, taps: int, normal: Callable) -> Tensor:
    """A ring whose history rows are random and all others NaN, slot 0 zero."""
    state = torch.full((layout.ring_slots, ring_len, channels), float("nan"))
    state[0] = 0
    for row, usable in zip(layout.rows, layout.history.tolist(), strict=True):
        for position in range(max(row.start - min(usable, taps - 1), 0), row.start):
            if row.slot:
                state[row.slot, position % ring_len] = normal(channels)
    return state


def _normals(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def _pitched(x: Tensor, extra: int) -> Tensor:
    """The same rows with `extra` NaN columns between them."""
    wide = torch.full((x.shape[0], x.shape[1] + extra), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def _copy(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy that keeps the pitch of rows."""
    if x.is_contiguous():
        return x.to(device, dtype, copy=True)
    base = x.as_strided((x.shape[0], x.stride(0)), (x.stride(0), 1)).to(device, dtype, copy=True)
    return base[:, : x.shape[1]]


def _shown(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: x.nan_to_num(nan=MISSING).cpu() for name, x in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class ResidualProblem:
    """Inputs of residual_conv_norm, of the model dtype except conv (fp32)."""

    layout: Layout
    partial: Tensor
    second: Tensor | None
    residual: Tensor
    conv: Tensor
    norm: Tensor
    state: Tensor
    tapped: bool = False


def make_residual_problem(
    rows: Sequence[Row], *, hidden: int, ring_len: int, dtype: torch.dtype, taps: int = 4,
    second: bool = False, extra: int = 0, tapped: bool = False,
) -> ResidualProblem:  # fmt: skip
    """Random rows `extra` elements apart; tapped: with a block drafter's tap."""
    normal, layout = _normals(1), make_layout(rows, taps)
    T = layout.meta.num_tokens
    return ResidualProblem(
        layout=layout,
        partial=_pitched(normal(T, hidden).to(dtype), extra),
        second=_pitched(normal(T, hidden).to(dtype), extra) if second else None,
        residual=_pitched((2 * normal(T, hidden)).to(dtype), extra),
        conv=0.4 * normal(taps, hidden),
        norm=(1 + 0.2 * normal(hidden)).to(dtype),
        state=make_state(layout, ring_len, hidden, taps, normal).to(dtype),
        tapped=tapped,
    )


def run_residual(
    problem: ResidualProblem,
    op: Callable,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **options,
) -> dict[str, Tensor]:
    """Call an implementation of residual_conv_norm on a copy of the problem."""
    device = torch.device(device)
    dtype = dtype or problem.partial.dtype
    layout = problem.layout.on(device)
    state = _copy(problem.state, device, dtype)
    ring = _ring(layout, state)
    if problem.second is not None:
        options["second_partial_TH"] = _copy(problem.second, device, dtype)
    shown = {}
    if problem.tapped:  # columns of a wider buffer, as several layers' taps lie side by side
        T, H = problem.partial.shape
        wide = torch.full((T, 3 * H), float("nan"), dtype=dtype, device=device)
        options["tap_TH"] = wide[:, H : 2 * H]
        shown["tap"] = wide
    normed, residual = op(
        _copy(problem.partial, device, dtype), _copy(problem.residual, device, dtype),
        conv_WH=problem.conv.to(device), norm_H=_copy(problem.norm, device, dtype), eps=EPS,
        meta=layout.meta, ring=ring, comm=SingleRank(), **options,
    )  # fmt: skip
    return _shown(normed=normed, residual=residual, ring=state, **shown)


def _ring(layout: Layout, state: Tensor) -> ConvStateView:
    return ConvStateView(
        state=state, slot=layout.slot, token_slot=layout.token_slot, history=layout.history,
        snapshot_slot=layout.snapshot_slot, snapshot_position=layout.snapshot_position,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrologueProblem:
    """Inputs of attention_prologue, of the model dtype except the convolutions (fp32)."""

    layout: Layout
    attention: AttentionConfig
    page_size: int
    qkvr: Tensor
    k_conv: Tensor
    v_conv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    k_state: Tensor
    v_state: Tensor


def make_prologue_problem(
    rows: Sequence[Row], *, heads: int, kv_heads: int, head_dim: int, ring_len: int,
    dtype: torch.dtype, taps: int = 4, d_rel: int = 16, log_floor: int | None = 3,
    page_size: int = 4, extra: int = 0,
) -> PrologueProblem:  # fmt: skip
    """Random rows `extra` elements apart; log_floor: None is a local layer."""
    normal, layout = _normals(2), make_layout(rows, taps)
    width, channels = (heads + 2 * kv_heads) * head_dim + heads * d_rel, kv_heads * head_dim
    return PrologueProblem(
        layout=layout,
        attention=AttentionConfig(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, d_rel=d_rel, extent=1024,
            window=0, log_floor=log_floor, log_alpha=0.1,
        ),
        page_size=page_size,
        qkvr=_pitched(normal(layout.meta.num_tokens, width).to(dtype), extra),
        k_conv=0.4 * normal(taps, channels),
        v_conv=0.4 * normal(taps, channels),
        q_norm=(1 + 0.2 * normal(head_dim)).to(dtype),
        k_norm=(1 + 0.2 * normal(head_dim)).to(dtype),
        k_state=make_state(layout, ring_len, channels, taps, normal).to(dtype),
        v_state=make_state(layout, ring_len, channels, taps, normal).to(dtype),
    )  # fmt: skip


def run_prologue(
    problem: PrologueProblem,
    op: Callable,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    **options,
) -> dict[str, Tensor]:
    """Call an implementation of attention_prologue on a copy of the problem."""
    device = torch.device(device)
    dtype = dtype or problem.qkvr.dtype
    layout, attention = problem.layout.on(device), problem.attention
    pages = 1 + layout.meta.num_tokens // problem.page_size
    shape = (pages, problem.page_size, attention.num_kv_heads, attention.head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    k_state, v_state = (_copy(x, device, dtype) for x in (problem.k_state, problem.v_state))
    kv = KVCacheView(
        k=k, v=v, page_size=problem.page_size, page_table=layout.slot[:, None],
        first_page=torch.zeros_like(layout.slot), slot=layout.token_slot, window=0,
    )  # fmt: skip
    q, r = op(
        _copy(problem.qkvr, device, dtype), attention=attention, k_conv=problem.k_conv.to(device),
        v_conv=problem.v_conv.to(device), q_norm=_copy(problem.q_norm, device, dtype),
        k_norm=_copy(problem.k_norm, device, dtype), eps=EPS, meta=layout.meta, kv=kv,
        k_ring=_ring(layout, k_state), v_ring=_ring(layout, v_state), **options,
    )  # fmt: skip
    return _shown(q=q, r=r, k=k, v=v, k_ring=k_state, v_ring=v_state)
