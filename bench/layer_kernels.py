"""Measure the layer's own kernels on this GPU, fused beside the chain of torch operations.

    python -m bench.layer_kernels --out rows.jsonl

Shapes are those of one rank of Inkling at TP8. Correctness first: the kernel register's cases run
on this GPU; a kernel that fails them gets no times. A time is the median of a captured graph whose
calls rotate over several sets of tensors, so that weights and rings come from HBM as in a model of
many layers. floor_us is the bytes that must move at 4.3 TB/s, the copy rate measured on an H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.moe.timing import count_launches, time_calls
from bench.rows import result_row
from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import ConvStateView, KVCacheView, SingleRank
from inkling_rocm.kernels import tuning
from inkling_rocm.kernels.norm import embed, rms_norm
from inkling_rocm.kernels.problems import EPS, Layout, Row, make_layout
from inkling_rocm.kernels.prologue import attention_prologue
from inkling_rocm.kernels.register import ENTRIES
from inkling_rocm.kernels.residual import residual_conv_norm
from inkling_rocm.ops.attention_prologue import attention_prologue as torch_prologue
from inkling_rocm.ops.embed import embed as torch_embed
from inkling_rocm.ops.residual_conv_norm import residual_conv_norm as torch_residual
from inkling_rocm.ops.rms_norm import rms_norm as torch_norm
from inkling_rocm.verify.cases import judge
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningTable

TOKENS = (1, 8, 32, 128, 8192)
HIDDEN, HEADS, HEAD_DIM, D_REL, TAPS, RING = 6144, 8, 128, 16, 4, 3
BYTES_PER_S = 4.3e12
DTYPE = torch.bfloat16
# Bytes of one set of tensors times the sets must exceed the L2.
ROTATE_BYTES, MAX_SETS = 160 << 20, 512


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One op at one size: what to call with an implementation and the number of a tensor set."""

    op: str
    case: str
    tokens: int
    bytes_moved: int
    sets: int
    config: dict
    call: Callable[[Callable, int], object]
    fused: Callable
    chain: Callable


def _layout(tokens: int) -> Layout:
    """One prompt chunk, or one token of each of `tokens` requests."""
    if tokens > 1024:
        rows = [Row(slot=1, start=4096, length=tokens)]
    else:
        rows = [Row(slot=1 + i, start=4096 + 7 * i, length=1) for i in range(tokens)]
    return make_layout(rows).on(torch.device("cuda"))


def _sets(bytes_moved: int) -> int:
    return max(2, min(MAX_SETS, -(-ROTATE_BYTES // bytes_moved)))


def _normal(*shape: int, scale: float = 1.0, dtype=DTYPE) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def _ring(layout: Layout, state: Tensor) -> ConvStateView:
    return ConvStateView(
        state=state, slot=layout.slot, token_slot=layout.token_slot, history=layout.history
    )


def _history_bytes(layout: Layout, channels: int) -> int:
    """Ring rows that are read and written."""
    tokens = layout.meta.num_tokens
    rows = layout.meta.num_rows * (TAPS - 1) + min(tokens, layout.meta.num_rows * RING)
    return rows * channels * DTYPE.itemsize


def _config(table: TuningTable, **facts: int | bool) -> dict:
    return table.select(arch_of_device("cuda:0").name, **facts).launch_kwargs()


def residual_case(tokens: int) -> Measured:
    layout = _layout(tokens)
    moved = 4 * tokens * HIDDEN * 2 + TAPS * HIDDEN * 4 + HIDDEN * 2
    moved += _history_bytes(layout, HIDDEN)
    sets = _sets(moved)
    partial, residual = _normal(sets, tokens, HIDDEN), _normal(sets, tokens, HIDDEN)
    conv, norm = _normal(sets, TAPS, HIDDEN, dtype=torch.float32), _normal(sets, HIDDEN)
    state = _normal(sets, layout.ring_slots, RING, HIDDEN)

    def call(op, i: int):
        return op(
            partial[i], residual[i], conv_WH=conv[i], norm_H=norm[i], eps=EPS, meta=layout.meta,
            ring=_ring(layout, state[i]), comm=SingleRank(),
        )  # fmt: skip

    return Measured(
        op="residual_conv_norm", case=f"T={tokens} H={HIDDEN}", tokens=tokens, bytes_moved=moved,
        sets=sets, call=call, fused=residual_conv_norm, chain=torch_residual,
        config=_config(tuning.RESIDUAL_CONV_NORM, hidden=HIDDEN, tokens=tokens),
    )  # fmt: skip


def prologue_case(tokens: int, kv_heads: int) -> Measured:
    """2 K/V heads: a local layer; 1: a global one."""
    layout, channels = _layout(tokens), kv_heads * HEAD_DIM
    width = (HEADS + 2 * kv_heads) * HEAD_DIM + HEADS * D_REL
    moved = tokens * 2 * 2 * (HEADS + 2 * kv_heads) * HEAD_DIM + 2 * TAPS * channels * 4
    moved += 2 * _history_bytes(layout, channels)
    sets = _sets(moved)
    qkvr = _normal(sets, tokens, width)
    k_conv, v_conv = (_normal(sets, TAPS, channels, dtype=torch.float32) for _ in range(2))
    norm = _normal(HEAD_DIM)
    states = _normal(2, sets, layout.ring_slots, RING, channels)
    pages = _normal(2, sets, 2 + tokens // 64, 64, kv_heads, HEAD_DIM)
    attention = AttentionConfig(
        num_heads=HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, d_rel=D_REL, extent=1024,
        window=0, log_floor=None if kv_heads == 2 else 128000, log_alpha=0.1,
    )  # fmt: skip

    def call(op, i: int):
        kv = KVCacheView(
            k=pages[0, i], v=pages[1, i], page_size=64, page_table=layout.slot[:, None],
            first_page=layout.slot, slot=layout.token_slot, window=0,
        )  # fmt: skip
        return op(
            qkvr[i], attention=attention, k_conv=k_conv[i], v_conv=v_conv[i], q_norm=norm,
            k_norm=norm, eps=EPS, meta=layout.meta, kv=kv, k_ring=_ring(layout, states[0, i]),
            v_ring=_ring(layout, states[1, i]),
        )  # fmt: skip

    return Measured(
        op="attention_prologue", case=f"T={tokens} {HEADS}/{kv_heads} heads", tokens=tokens,
        bytes_moved=moved, sets=sets, call=call, fused=attention_prologue, chain=torch_prologue,
        config=_config(
            tuning.ATTENTION_PROLOGUE, tokens=tokens, decode=layout.meta.q_uniform == 1
        ),
    )  # fmt: skip


def norm_case(tokens: int) -> Measured:
    moved = 2 * tokens * HIDDEN * 2 + HIDDEN * 2
    sets = _sets(moved)
    x, norm = _normal(sets, tokens, HIDDEN), _normal(sets, HIDDEN)
    return Measured(
        op="rms_norm", case=f"T={tokens} H={HIDDEN}", tokens=tokens, bytes_moved=moved, sets=sets,
        call=lambda op, i: op(x[i], norm[i], EPS), fused=rms_norm, chain=torch_norm,
        config=_config(tuning.RMS_NORM, hidden=HIDDEN),
    )  # fmt: skip


def embed_case(tokens: int) -> Measured:
    moved, vocabulary = 2 * tokens * HIDDEN * 2 + HIDDEN * 2, 200064 // 8
    sets = _sets(moved)
    table, norm = _normal(vocabulary, HIDDEN), _normal(HIDDEN)
    ids = torch.randint(0, vocabulary, (sets, tokens), device="cuda")
    return Measured(
        op="embed", case=f"T={tokens} H={HIDDEN}", tokens=tokens, bytes_moved=moved, sets=sets,
        call=lambda op, i: op(ids[i], table, norm, eps=EPS, comm=SingleRank()),
        fused=embed, chain=torch_embed, config=_config(tuning.EMBED, hidden=HIDDEN),
    )  # fmt: skip


def all_cases(tokens: int) -> list[Measured]:
    """Every op at one number of tokens."""
    return [
        prologue_case(tokens, 2),
        prologue_case(tokens, 1),
        residual_case(tokens),
        norm_case(tokens),
        embed_case(tokens),
    ]


def gates() -> dict[str, str]:
    """By entry: "passed", or the failures of its cases on this GPU."""
    device, arch, found = torch.device("cuda"), arch_of_device("cuda:0").name, {}
    for entry in ENTRIES:
        failures = [
            f"{case.name}: {report.output}: {report.error:.2g} > {report.budget:.2g}"
            for row in entry.table.for_arch(arch)
            for case in entry.cases(arch, row)
            for report in map(judge, case.run(device))
            if not report.passed
        ]
        found[entry.name.removeprefix("inkling_rocm.")] = "; ".join(failures) or "passed"
    return found


def measure(out: str, tokens: tuple[int, ...] = TOKENS) -> None:
    """Append a row for each op, size and implementation to the file `out`."""
    passed = gates()
    print(passed, flush=True)
    name, arch = torch.cuda.get_device_name(), arch_of_device("cuda:0").name
    with open(out, "a", encoding="utf-8") as file:
        for case in (case for count in tokens for case in all_cases(count)):
            floor = case.bytes_moved / BYTES_PER_S * 1e6
            for variant, op in (("triton", case.fused), ("torch", case.chain)):
                gate = passed[case.op] if variant == "triton" else "reference"
                if gate not in ("passed", "reference"):
                    continue
                times = time_calls(lambda i, op=op, case=case: case.call(op, i), case.sets)
                launches = count_launches(lambda op=op, case=case: case.call(op, 0))
                row = result_row(
                    case.op, case.case, device=name, arch=arch, gate=gate, evidence="measured",
                    variant=variant, launches=launches, bytes=case.bytes_moved,
                    config=case.config if variant == "triton" else None,
                    floor_us=round(floor, 2), over_floor=round(times["p50_us"] / floor, 2), **times,
                )  # fmt: skip
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    f"{case.op:20} {case.case:20} {variant:7} {launches:3} launches "
                    f"{times['p50_us']:9.2f} us, floor {floor:8.2f}", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    measure(parser.parse_args().out)
