"""The layer's kernels against the torch references in float64, and the ways they can go wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.host import SingleRank
from inkling_rocm.kernels.norm import embed, rms_norm
from inkling_rocm.kernels.problems import (
    EPS,
    Row,
    make_prologue_problem,
    make_residual_problem,
    run_prologue,
    run_residual,
)
from inkling_rocm.kernels.prologue import attention_prologue
from inkling_rocm.kernels.register import outcomes, prologue_outcomes, residual_outcomes
from inkling_rocm.kernels.residual import residual_conv_norm
from inkling_rocm.kernels.tuning import ATTENTION_PROLOGUE
from inkling_rocm.ops.attention_prologue import attention_prologue as torch_prologue
from inkling_rocm.ops.residual_conv_norm import residual_conv_norm as torch_residual
from inkling_rocm.verify.cases import judge

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rows(*triples, **last) -> tuple[Row, ...]:
    """Rows from (slot, start, length)."""
    return tuple(Row(slot=a, start=b, length=c, **last) for a, b, c in triples)


# Histories of 0 to 3, empty rows, padding, tokens without a slot, rows in any order.
RAGGED = (
    *rows((3, 0, 9), (1, 1, 5), (0, 0, 3), (5, 40, 0), (4, 2, 1), (2, 3, 2)),
    Row(slot=6, start=77, length=6, skipped=2),
    Row(slot=7, start=9, length=4, history=0),
)
SNAPSHOTS = (
    Row(slot=1, start=0, length=11, snapshot=5),
    Row(slot=2, start=13, length=2, snapshot=14),
    Row(slot=3, start=8, length=3, snapshot=8),
    Row(slot=4, start=1, length=2, snapshot=2),
    Row(slot=5, start=6, length=2, snapshot=12),
    Row(slot=6, start=30, length=4, snapshot=33, skipped=2),
)
DRAFTS = rows((2, 11, 4), (0, 0, 4), (1, 0, 4), (3, 2, 4))
DRAFTS_SNAPSHOT = (Row(slot=1, start=6, length=4, snapshot=8), *rows((2, 1, 4), (3, 30, 4)))
TOKENS = (
    *rows((2, 0, 1), (0, 0, 1), (1, 2, 1), (4, 511, 1)),
    Row(slot=3, start=5, length=1, snapshot=6),
    Row(slot=5, start=5, length=1, skipped=1),
)
BATCHES = [
    pytest.param(RAGGED, 3, BF16, id="ragged-R3-bf16"),
    pytest.param(RAGGED, 4, FP32, id="ragged-R4-fp32"),
    pytest.param(RAGGED, 12, FP16, id="ragged-R12-fp16"),
    pytest.param(SNAPSHOTS, 3, FP32, id="snapshots-R3-fp32"),
    pytest.param(SNAPSHOTS, 7, BF16, id="snapshots-R7-bf16"),
    pytest.param(DRAFTS, 7, FP16, id="drafts-R7-fp16"),
    pytest.param(DRAFTS_SNAPSHOT, 12, FP32, id="drafts-R12-fp32"),
    pytest.param(DRAFTS, 4, BF16, id="drafts-R4-bf16"),
    pytest.param(TOKENS, 3, BF16, id="tokens-R3-bf16"),
    pytest.param(TOKENS, 12, FP32, id="tokens-R12-fp32"),
]


def assert_passed(found) -> None:
    reports = [judge(outcome) for outcome in found]
    assert reports
    failed = [report for report in reports if not report.passed]
    assert not failed, failed


@pytest.mark.parametrize(("batch", "ring_len", "dtype"), BATCHES)
def test_residual_conv_norm(target, batch, ring_len, dtype):
    problem = make_residual_problem(
        batch, hidden=72, ring_len=ring_len, dtype=dtype, second=dtype is BF16, extra=ring_len,
        tapped=dtype is not FP32,
    )  # fmt: skip
    with target.active():
        assert_passed(residual_outcomes(problem, target.device, arch=target.arch))


@pytest.mark.parametrize(("batch", "ring_len", "dtype"), BATCHES)
def test_attention_prologue(target, batch, ring_len, dtype):
    heads, kv_heads, head_dim = {3: (8, 2, 128), 4: (3, 1, 24)}.get(ring_len, (10, 2, 16))
    problem = make_prologue_problem(
        batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ring_len=ring_len, dtype=dtype,
        log_floor=3 if dtype is BF16 else None, extra=ring_len,
    )  # fmt: skip
    with target.active():
        assert_passed(prologue_outcomes(problem, target.device, arch=target.arch))


@pytest.mark.parametrize("taps", [1, 2, 6])
def test_other_numbers_of_taps(target, taps):
    ring_len = max(taps - 1, 1)
    batch = (*RAGGED, Row(slot=8, start=20, length=7, snapshot=25))
    shape = {"ring_len": ring_len, "dtype": FP32, "taps": taps}
    with target.active():
        problem = make_residual_problem(batch, hidden=40, **shape)
        assert_passed(residual_outcomes(problem, target.device, arch=target.arch))
        problem = make_prologue_problem(batch, heads=2, kv_heads=1, head_dim=8, **shape)
        assert_passed(prologue_outcomes(problem, target.device, arch=target.arch))


@pytest.mark.parametrize("ring_len", [3, 7])
def test_any_chunking_gives_the_same_bits(target, ring_len):
    """A sequence fed one to eight tokens at a time: outputs of the whole, bit for bit."""
    length, state = 25, None
    whole = make_residual_problem(rows((1, 0, length)), hidden=72, ring_len=ring_len, dtype=BF16)
    with target.active():
        want = run_residual(whole, residual_conv_norm, target.device, arch=target.arch)
        for step in (1, 2, 3, 5, 8):
            state = whole.state
            for first in range(0, length, step):
                part = slice(first, min(first + step, length))
                batch = rows((1, first, part.stop - first), (0, 0, 1))
                chunk = make_residual_problem(batch, hidden=72, ring_len=ring_len, dtype=BF16)
                chunk.partial[:-1], chunk.residual[:-1] = whole.partial[part], whole.residual[part]
                chunk = type(chunk)(
                    **{**vars(chunk), "conv": whole.conv, "norm": whole.norm, "state": state}
                )
                got = run_residual(chunk, residual_conv_norm, target.device, arch=target.arch)
                state = got["ring"].nan_to_num(nan=0.0)
                for name in ("normed", "residual"):
                    assert torch.equal(got[name][:-1], want[name][part]), (step, first)
        assert torch.equal(got["ring"][:2], want["ring"][:2])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rms_norm_and_embed(target, dtype):
    x = torch.randn(3, 2, 203).to(target.device, dtype)[..., :200]
    weight = torch.randn(200).to(target.device, dtype)
    table = torch.randn(9, 200).to(target.device, dtype)
    ids = torch.tensor([8, 0, 3], device=target.device)
    with target.active():
        norm = rms_norm(x, weight, EPS, arch=target.arch)
        rows_TH = embed(ids, table, weight, eps=EPS, comm=SingleRank(), arch=target.arch)
        assert rms_norm(x[:0], weight, EPS, arch=target.arch).shape == (0, 2, 200)
    for got, source in ((norm, x), (rows_TH, table[ids])):
        wide = source.double()
        want = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 2 * torch.finfo(dtype).eps


def test_embed_of_a_vocabulary_in_shards(target):
    """Rows of other ranks count as zero in the all-reduce."""

    class TwoRanks(SingleRank):
        tp_size = 2

        def __init__(self, rank, others):
            self.tp_rank, self.others, self.sent = rank, others, None

        def all_reduce(self, x):
            self.sent = x.clone()
            return x if self.others is None else x + self.others

    table = torch.randn(10, 64).to(target.device)
    norm = torch.ones(64, device=target.device)
    ids = torch.tensor([9, 0, 4, 5], device=target.device)
    with target.active():
        first = TwoRanks(0, None)
        embed(ids, table[:5], norm, eps=EPS, comm=first, arch=target.arch)
        got = embed(ids, table[5:], norm, eps=EPS, comm=TwoRanks(1, first.sent), arch=target.arch)
        want = embed(ids, table, norm, eps=EPS, comm=SingleRank(), arch=target.arch)
    assert (first.sent[[0, 3]] == 0).all()
    torch.testing.assert_close(got, want)


def test_rows_beyond_two_to_the_31_elements(target):
    """Addresses of tokens are 64-bit: 9 rows, 2^28 elements apart (their memory is never touched
    between)."""
    pitch, T = 1 << 28, 9
    base = torch.empty((T - 1) * pitch + 16, dtype=BF16, device=target.device)
    x = base.as_strided((T, 16), (pitch, 1))
    x.copy_(torch.randn(T, 16))
    weight = torch.ones(16, dtype=BF16, device=target.device)
    with target.active():
        assert torch.equal(
            rms_norm(x, weight, EPS, arch=target.arch),
            rms_norm(x.contiguous(), weight, EPS, arch=target.arch),
        )
    problem = make_residual_problem(rows((1, 0, T)), hidden=16, ring_len=3, dtype=BF16)

    def far(partial, residual, **options):
        x.copy_(partial)
        return residual_conv_norm(x, residual, **options)

    with target.active():
        assert_passed(
            outcomes(
                problem, run_residual, far, torch_residual, target.device, arch=target.arch
            )
        )  # fmt: skip


def _forgets_tau(qkvr, *, attention, **options):
    return torch_prologue(
        qkvr, attention=type(attention)(**{**vars(attention), "log_floor": None}), **options
    )


def _drops_a_tap(qkvr, *, k_conv, **options):
    return torch_prologue(qkvr, k_conv=k_conv * (torch.arange(4) > 0)[:, None], **options)


def _swaps_the_rings(qkvr, *, k_ring, v_ring, **options):
    return torch_prologue(qkvr, k_ring=v_ring, v_ring=k_ring, **options)


def _writes_every_token(qkvr, *, kv, **options):
    everyone = type(kv)(**{**vars(kv), "slot": torch.arange(len(kv.slot))})
    return torch_prologue(qkvr, kv=everyone, **options)


@pytest.mark.parametrize(
    "wrong", [_forgets_tau, _drops_a_tap, _swaps_the_rings, _writes_every_token]
)
def test_a_wrong_prologue_is_noticed(wrong):
    problem = make_prologue_problem(
        RAGGED, heads=4, kv_heads=2, head_dim=16, ring_len=4, dtype=FP32
    )
    found = outcomes(problem, run_prologue, wrong, torch_prologue, "cpu")
    assert not all(judge(outcome).passed for outcome in found)


def _keeps_no_tail(partial, residual, *, ring, **options):
    aside = type(ring)(**{**vars(ring), "state": ring.state.clone()})
    return torch_residual(partial, residual, ring=aside, **options)


def _ignores_the_history(partial, residual, *, ring, **options):
    fresh = type(ring)(**{**vars(ring), "history": torch.zeros_like(ring.history)})
    return torch_residual(partial, residual, ring=fresh, **options)


def _forgets_the_snapshot(partial, residual, *, ring, **options):
    without = type(ring)(**{**vars(ring), "snapshot_slot": None, "snapshot_position": None})
    return torch_residual(partial, residual, ring=without, **options)


def _taps_the_stream_alone(partial, residual, *, tap_TH, **options):
    result = torch_residual(partial, residual, **options)
    tap_TH.copy_(residual)
    return result


def _taps_after_the_convolution(partial, residual, *, tap_TH, **options):
    normed, residual = torch_residual(partial, residual, **options)
    tap_TH.copy_(residual)
    return normed, residual


@pytest.mark.parametrize(
    "wrong",
    [
        _keeps_no_tail,
        _ignores_the_history,
        _forgets_the_snapshot,
        _taps_the_stream_alone,
        _taps_after_the_convolution,
    ],
)
def test_a_wrong_residual_is_noticed(wrong):
    problem = make_residual_problem(SNAPSHOTS, hidden=24, ring_len=4, dtype=BF16, tapped=True)
    found = outcomes(problem, run_residual, wrong, torch_residual, "cpu")
    assert not all(judge(outcome).passed for outcome in found)


def test_what_does_not_fit_is_named():
    problem = make_residual_problem(rows((1, 0, 2)), hidden=16, ring_len=2, dtype=BF16)
    with pytest.raises(ValueError, match=r"ring's rows is 2; wanted at least 3"):
        run_residual(problem, residual_conv_norm, arch="gfx942")
    with pytest.raises(ValueError, match="use the torch reference"):
        rms_norm(torch.ones(2, 3), torch.ones(3), EPS)
    with pytest.raises(ValueError, match="weight's dtype"):
        rms_norm(torch.ones(2, 3), torch.ones(3).double(), EPS, arch="gfx950")


def test_a_program_that_overwrites_its_history_has_one_warp():
    wide = ATTENTION_PROLOGUE.select("gfx942", tokens=8192, decode=False)
    problem = make_prologue_problem(
        TOKENS, heads=2, kv_heads=1, head_dim=16, ring_len=3, dtype=BF16
    )
    with emulate("gfx942"), pytest.raises(ValueError, match="num_warps is 4; wanted 1"):
        run_prologue(problem, attention_prologue, arch="gfx942", row=wide)
    for arch in ("gfx942", "gfx950", "sm80", "sm90", "sm100"):
        row = ATTENTION_PROLOGUE.select(arch, tokens=1 << 20, decode=True)
        assert row.options["num_warps"] == 1
