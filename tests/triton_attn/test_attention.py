"""Prefill, decode and verify against the float64 reference, on every target."""

import pytest
import torch

from tests.triton_attn.problems import make_problem, reference, run, within_budget

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PREFILL = {
    "global, prefixes, an empty request": ((33, 1, 0, 40), (90, 1, 7, 75), {}),
    "window of the extent, GQA 2": ((50, 35), (130, 35), {"window": 40, "heads": 4, "kv_heads": 2,
    "dtype": BF16}),
    "extent shorter than the window": ((40,), (120,), {"window": 48, "extent": 24}),
}  # fmt: skip
MORE_PREFILL = {
    "fp32, page size 1": ((34, 3), (60, 3), {"dtype": FP32, "page_size": 1}),
    "window shorter than the extent": ((40,), (120,), {"window": 24, "extent": 40}),
    "page of 64, d_rel 8": ((40, 64), (100, 64), {"page_size": 64, "d_rel": 8, "dtype": BF16}),
    "head_dim 96": ((33,), (50,), {"head_dim": 96}),
    "head_dim 192": ((33,), (50,), {"head_dim": 192}),
    "head_dim 256, page of 128": ((33,), (50,), {"head_dim": 256, "page_size": 128}),
}
DECODE = {
    "global, several splits, a padded row": ((1, 1, 1), (130, 3, 0), {"heads": 4}),
    "window, MHA": ((1, 1), (131, 20), {"window": 40, "heads": 2, "kv_heads": 2, "dtype": BF16}),
}
MORE_DECODE = {
    "fp32, page size 1": ((1, 1), (70, 9), {"dtype": FP32, "page_size": 1}),
    "extent shorter than the window": ((1,), (120,), {"window": 48, "extent": 24}),
    "page of 128, GQA 6": ((1, 1), (140, 128), {"heads": 6, "page_size": 128}),
    "head_dim 192": ((1,), (50,), {"head_dim": 192}),
}
VERIFY = {"global, ragged": ((4, 2, 0, 1), (100, 9, 4, 33), {"heads": 4, "dtype": BF16})}
MORE_VERIFY = {
    "window, 9 tokens": ((9, 5), (100, 9), {"window": 40, "heads": 4, "kv_heads": 2}),
    "fp32, 3 tokens": ((3, 2), (50, 9), {"dtype": FP32}),
    "16 tokens": ((16,), (60,), {}),
}


def check(target, entry, case):
    q_lens, kv_lens, options = case
    problem = make_problem(q_lens, kv_lens, **options)
    out, lse = run(target, problem, entry, lse=True)
    _, want_lse = reference(problem)
    live = torch.isfinite(want_lse).all(1)
    assert torch.isfinite(out).all()
    assert within_budget(problem, out)
    # fp16 and bf16 features round the bias, so the LSE carries that error too.
    tolerance = 1e-5 if problem.q.dtype == FP32 else 4 * torch.finfo(problem.q.dtype).eps
    assert (lse[live] - want_lse[live]).abs().max() <= tolerance * want_lse[live].abs().max()


@pytest.mark.parametrize("case", PREFILL.values(), ids=PREFILL)
def test_prefill(target, case):
    check(target, "prefill", case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_PREFILL.values(), ids=MORE_PREFILL)
def test_prefill_more(target, case):
    check(target, "prefill", case)


@pytest.mark.parametrize("case", DECODE.values(), ids=DECODE)
def test_decode(target, case):
    check(target, "decode", case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_DECODE.values(), ids=MORE_DECODE)
def test_decode_more(target, case):
    check(target, "decode", case)


@pytest.mark.parametrize("case", VERIFY.values(), ids=VERIFY)
def test_verify(target, case):
    check(target, "verify", case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_VERIFY.values(), ids=MORE_VERIFY)
def test_verify_more(target, case):
    check(target, "verify", case)


@pytest.mark.full
@pytest.mark.parametrize("entry", ["prefill", "decode", "verify"])
def test_table_rows_at_inkling_shapes(target, entry):
    """The tuned tiles themselves, head_dim 128 in bf16, both kinds of layer."""
    q_lens = {"prefill": (140, 1, 9), "decode": (1, 1, 1), "verify": (9, 4, 2)}[entry]
    for window, extent, kv_heads in ((0, 96, 1), (80, 80, 2)):
        problem = make_problem(
            q_lens, (300, 70, 9), heads=8, kv_heads=kv_heads, head_dim=128, page_size=128,
            window=window,
            extent=extent, dtype=BF16,
        )  # fmt: skip
        assert within_budget(problem, run(target, problem, entry, table_row=True))
