"""Faults that users of other servers hit; each must stay impossible here, and each check must be
able to fail."""

import re

import pytest
import torch

from tests.support.offline import compile_only
from tests.triton_attn.problems import (
    DECODE_OPTIONS,
    make_problem,
    run,
    small_row,
    within_budget,
)
from triton_attn import RelativeBias, RelativeProfile, attention_decode, attention_prefill
from triton_attn.profile import BUFFER_BYTES, BUFFER_PAD, pitch_of, plan_chunks

BF16 = torch.bfloat16


def zero_bias(problem):
    bias = problem.bias
    return RelativeBias(r=torch.zeros_like(bias.r), profile=bias.profile, tau=bias.tau)


def shifted_bias(problem, by=1):
    """The bias displaced by one distance: the classic off-by-prefix."""
    bias = problem.bias
    moved = RelativeProfile.prepare(bias.profile.projection.roll(by, 1))
    return RelativeBias(r=bias.r, profile=moved, tau=bias.tau)


@pytest.mark.parametrize("entry", ["prefill", "decode", "verify"])
def test_bias_is_present_in_place_and_complete(gfx950, entry):
    """q_len != kv_len, GQA > 1, context % 128 != 0; a zeroed or displaced bias must be noticed."""
    q_lens = {"prefill": (33, 20), "decode": (1, 1), "verify": (3, 4)}[entry]
    problem = make_problem(q_lens, (141, 77), heads=4, kv_heads=2)
    out = run(gfx950, problem, entry)
    assert within_budget(problem, out)
    for wrong in (zero_bias(problem), shifted_bias(problem), None):
        assert not within_budget(problem, run(gfx950, problem, entry, mod=wrong))


@pytest.mark.parametrize("entry", ["prefill", "decode", "verify"])
@pytest.mark.parametrize("window", [31, 32, 33])
def test_window_counts_the_current_key(gfx950, entry, window):
    """One key short (a server did that at decode) or long must be noticed."""
    q_lens = {"prefill": (20,), "decode": (1,), "verify": (2,)}[entry]
    problem = make_problem(
        q_lens, (100,), window=window + 1, extent=64
    )  # holds the pages of every window here
    exact = with_window(problem, window)
    out = run(gfx950, exact, entry)
    assert within_budget(exact, out)
    for other in (window - 1, window + 1):
        assert not within_budget(with_window(problem, other), out)


def with_window(problem, window):
    return problem.__class__(**{**vars(problem), "paged": {**problem.paged, "window": window}})


def test_partial_tiles_read_and_write_only_their_rows(gfx950):
    """Batch of nine requests whose last tiles are partial; q ends exactly at its storage's end.
    The emulator
    raises on any access outside a tensor; rows of no request keep what `out` held."""
    q_lens = (1, 31, 32, 33, 5, 2, 9, 17, 3)
    problem = make_problem(q_lens, tuple(n + 3 for n in q_lens), heads=1)
    out = torch.full((problem.q.shape[0] + 4, *problem.q.shape[1:]), 3.0, dtype=problem.q.dtype)
    got = run(gfx950, problem, "prefill", out=out[: problem.q.shape[0]])
    assert within_budget(problem, got)
    assert (out[problem.q.shape[0] :] == 3.0).all()


@pytest.mark.parametrize("q_lens", [(100, 28), (64, 64), (127, 1), (128,)])
def test_total_of_a_multiple_of_128(gfx950, q_lens):
    problem = make_problem(q_lens, tuple(n + 3 for n in q_lens), heads=1)
    assert within_budget(problem, run(gfx950, problem, "prefill"))


def test_local_decode_touches_only_its_window(gfx950):
    """Time flat in context: the same loads at 200 and at 20000 keys; pages below the window do not
    even exist."""
    loads = {}
    for context in (200, 20000):
        problem = make_problem((1,), (context,), window=40)
        with gfx950.active(counters=True) as driver:
            out = attention_decode(
                problem.q, problem.k_pages, problem.v_pages, score_mod=problem.bias,
                max_kv_len=32768, arch="gfx950",
                row=small_row("gfx950", DECODE_OPTIONS), **problem.paged,
            )  # fmt: skip
        assert within_budget(problem, out)
        loads[context] = driver.records[-1].counters.traffic.load_bytes
    assert loads[20000] <= 1.3 * loads[200]  # the window may straddle one more tile


def test_no_32_bit_offsets(gfx950):
    """K/V pages more than 2^31 elements into the pool."""
    problem = make_problem((5,), (40,), heads=1, page_size=16)
    stride = 3 * 2**28 + 64
    assert int(problem.paged["page_table"].max()) * stride >= 2**31
    pages = []
    for dense in (problem.k_pages, problem.v_pages):
        pool = torch.empty(
            len(dense) * stride, dtype=dense.dtype
        )  # virtual memory: few pages are touched
        view = pool.as_strided(dense.shape, (stride, 64, 64, 1))
        view.copy_(dense)
        pages.append(view)
    moved = problem.__class__(**{**vars(problem), "k_pages": pages[0], "v_pages": pages[1]})
    for entry in ("prefill", "verify"):
        assert within_budget(moved, run(gfx950, moved, entry))


@pytest.mark.parametrize(
    ("tokens", "heads", "extent"), [(32768, 64, 1024), (1 << 20, 64, 1024), (8192, 8, 512)]
)
def test_profile_buffer_is_bounded(tokens, heads, extent):
    blocks = tokens // 128 + 1
    chunks = plan_chunks(blocks, heads, 128, extent, 2)
    covered = torch.zeros(heads, blocks, dtype=torch.int8)
    for c in chunks:
        rows = c.heads * c.blocks * 128
        assert (rows * pitch_of(extent) + 2 * BUFFER_PAD) * 2 <= BUFFER_BYTES
        covered[c.head0 : c.head0 + c.heads, c.first_block : c.first_block + c.blocks] += 1
    assert (covered == 1).all()


def test_chunked_prefill_is_the_same_prefill(gfx950, monkeypatch):
    """A buffer too small for one head: chunks over heads and blocks, bit for bit the same
    result."""
    problem = make_problem((70, 33), (90, 133))
    whole = run(gfx950, problem, "prefill")
    import triton_attn.prefill as module

    seen = []

    def tiny(*args):
        seen.extend(plan_chunks(*args, bound_bytes=2 * 2 * (BUFFER_PAD + pitch_of(40) * 32)))
        return seen

    monkeypatch.setattr(module, "plan_chunks", tiny)
    assert torch.equal(run(gfx950, problem, "prefill"), whole)
    assert len(seen) > 4


@pytest.mark.parametrize("biased", [True, False])
def test_nothing_of_a_call_starts_before_the_callers_stream_allows(monkeypatch, biased):
    """KV-write race: a launch that may start early (launch_pdl) follows a launch of this package,
    never one of the caller's, which may be what writes the keys (see also test_gpu.py)."""
    import triton_attn.hopper as hopper
    import triton_attn.prefill as prefill
    import triton_attn.profile as profile

    early = []

    class Writer:
        def __getitem__(self, grid):
            return lambda *_, **options: early.append(options.get("launch_pdl", False))

    def attention(_tensors, _strides, constants, *_):
        early.append(constants.get("launch_pdl", False))

    def tiny(*args):
        return plan_chunks(*args, bound_bytes=2 * 2 * (BUFFER_PAD + pitch_of(40) * 128))

    monkeypatch.setattr(profile, "_profile_rows_kernel", Writer())
    monkeypatch.setattr(hopper, "launch_hopper", attention)
    monkeypatch.setattr(prefill, "plan_chunks", tiny)
    p = make_problem((200, 33), (220, 133), dtype=BF16)
    attention_prefill(
        p.q, p.k_pages, p.v_pages, cu_seqlens_q=p.cu_seqlens_q, q_start=p.q_start,
        score_mod=p.bias if biased else None, arch="sm90", **p.paged,
    )  # fmt: skip
    assert early[0] is False
    if biased:
        assert early.count(False) == 1
        assert len(early) > 4
    else:
        assert early == [False]


def test_results_do_not_depend_on_batch_mates_or_bounds(gfx950):
    both = make_problem((1, 1), (130, 57), seed=3)
    out = run(gfx950, both, "decode")
    paged = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in both.paged.items()}
    bias = RelativeBias(r=both.bias.r[:1], profile=both.bias.profile, tau=both.bias.tau[:1])
    alone = both.__class__(
        **{
            **vars(both),
            "q": both.q[:1],
            "paged": paged,
            "bias": bias,
            "cu_seqlens_q": both.cu_seqlens_q[:2],
        }
    )
    for bound in (130, 4096, 1 << 20):
        assert torch.equal(run(gfx950, alone, "decode", max_kv_len=bound), out[:1])


def test_strided_queries_and_features(gfx950):
    """q and r as slices of packed rows."""
    problem = make_problem((33, 2), (50, 40), heads=2)
    T = problem.q.shape[0]
    packed = torch.full((T, 400), float("nan"), dtype=problem.q.dtype)
    packed[:, 16:144] = problem.q.reshape(T, -1)
    packed[:, 300:332] = problem.bias.r.reshape(T, -1)
    q = packed[:, 16:144].view(T, 2, 64)
    bias = RelativeBias(
        r=packed[:, 300:332].view(T, 2, 16), profile=problem.bias.profile, tau=problem.bias.tau
    )
    moved = problem.__class__(**{**vars(problem), "q": q, "bias": bias})
    assert within_budget(
        problem, run(gfx950, moved, "prefill", out=torch.empty(T, 2, 64, dtype=q.dtype))
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_wave_drains_its_stores_before_the_ticket(arch):
    """An AMD barrier does not wait for global stores; the drain must sit between the partial
    results and the ticket."""
    p = make_problem((1, 1), (130, 90), heads=4)
    with compile_only(arch) as kernels:
        attention_decode(
            p.q,
            p.k_pages,
            p.v_pages,
            max_kv_len=4096,
            arch=arch,
            row=small_row(arch, DECODE_OPTIONS, SPLIT=64),
            **p.paged,
        )
    asm = kernels[-1].asm["amdgcn"]
    drain = re.search(r";;#ASMSTART\s+s_waitcnt vmcnt\(0\)", asm)
    assert drain, "no drain"
    before, after = asm[: drain.start()], asm[drain.end() :]
    assert "atomic_add" not in before
    assert re.search(r"s_barrier.*atomic_add", after, re.S)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": torch.zeros(1, 3, dtype=torch.int64)}, "page_table's dtype"),
        ({"first_page": torch.zeros(2, dtype=torch.int32)}, "first_page's shape"),
        ({"window": -1}, "window"),
    ],
)
def test_errors_name_the_argument(change, message):
    p = make_problem((4,), (20,))
    with pytest.raises(ValueError, match=message):
        attention_prefill(
            p.q, p.k_pages, p.v_pages, cu_seqlens_q=p.cu_seqlens_q, q_start=p.q_start,
            arch="gfx950",
            **{**p.paged, **change},
        )  # fmt: skip


def test_cpu_tensors_without_an_architecture_are_refused():
    p = make_problem((4,), (20,))
    with pytest.raises(ValueError, match="tensors are on the CPU"):
        attention_prefill(
            p.q, p.k_pages, p.v_pages, cu_seqlens_q=p.cu_seqlens_q, q_start=p.q_start, **p.paged
        )
