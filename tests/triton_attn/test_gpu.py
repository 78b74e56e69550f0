"""What only a GPU shows: graph capture with lengths that change between replays, and streams."""

import pytest
import torch

import triton_attn.prefill as prefill
from tests.triton_attn.problems import make_problem, reference, within_budget
from triton_attn import (
    DecodeWorkspace,
    RelativeBias,
    attention_decode,
    attention_prefill,
    attention_verify,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_captured_decode_follows_the_lengths_on_the_device():
    short = make_problem((1, 1), (130, 57), head_dim=128, page_size=64, dtype=torch.bfloat16)
    problem = short.to("cuda")
    out = torch.full_like(problem.q, float("nan"))
    work = DecodeWorkspace.allocate(
        problem.q.device, max_requests=2, num_kv_heads=1, max_rows=2, head_dim=128
    )

    def call():
        attention_decode(
            problem.q, problem.k_pages, problem.v_pages, score_mod=problem.bias, out=out,
            workspace=work, max_kv_len=4096, **problem.paged,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ((130, 57), (64, 1), (129, 50)):
        kv_len = torch.tensor(lengths, dtype=torch.int32)
        problem.paged["kv_len"].copy_(kv_len)
        out.fill_(float("nan"))
        graph.replay()
        now = short.__class__(**{**vars(short), "paged": {**short.paged, "kv_len": kv_len}})
        assert within_budget(now, out.cpu())


def test_a_captured_prefill_equals_an_eager_one():
    problem = make_problem(
        (300, 1, 77), (500, 9, 77), heads=4, head_dim=128, page_size=64, dtype=torch.bfloat16
    ).to("cuda")
    out = torch.full_like(problem.q, float("nan"))

    def call():
        attention_prefill(
            problem.q, problem.k_pages, problem.v_pages, cu_seqlens_q=problem.cu_seqlens_q,
            q_start=problem.q_start, score_mod=problem.bias, out=out, **problem.paged,
        )  # fmt: skip

    call()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, eager)


@pytest.mark.parametrize("entry", ["prefill", "decode"])
def test_keys_written_on_another_stream_are_seen_after_its_event(entry):
    """The rule: a call reads its inputs on the current stream, and nothing of it starts before what
    that stream waited for, the attention's early start (launch_pdl) included. Without the wait the
    call must read the pages as they were, or this test shows nothing."""
    q_lens = {"prefill": (300, 1), "decode": (1, 1)}[entry]
    host = make_problem(
        q_lens, (500, 9), heads=4, head_dim=128, page_size=64, window=128, dtype=torch.bfloat16
    )
    problem = host.to("cuda")
    fresh = problem.k_pages.clone(), problem.v_pages.clone()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()

    def call(wait):
        for pages in (problem.k_pages, problem.v_pages):
            pages.fill_(float("nan"))
        out = torch.full_like(problem.q, float("nan"))
        torch.cuda.synchronize()
        written = torch.cuda.Event()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(100_000_000)  # tens of milliseconds
            problem.k_pages.copy_(fresh[0])
            problem.v_pages.copy_(fresh[1])
            written.record()
        with torch.cuda.stream(reader):
            if wait:
                reader.wait_event(written)
            shared = {"score_mod": problem.bias, "out": out, **problem.paged}
            tensors = (problem.q, problem.k_pages, problem.v_pages)
            if entry == "prefill":
                starts = {"cu_seqlens_q": problem.cu_seqlens_q, "q_start": problem.q_start}
                attention_prefill(*tensors, **starts, **shared)
            else:
                attention_decode(*tensors, max_kv_len=512, **shared)
        torch.cuda.synchronize()
        return out.cpu()

    call(wait=True)  # compile
    assert within_budget(host, call(wait=True))
    assert not within_budget(host, call(wait=False))


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "options"),
    [
        ((300, 65, 0, 1), (900, 65, 7, 33), {"window": 512, "extent": 512}),
        # Tiles wholly inside the window and beyond the extent.
        ((700, 64), (1500, 64), {"window": 512, "extent": 64}),
        ((130, 7), (131, 300), {"window": 40, "extent": 100}),
        # The second half of a block has no rows, and its window starts past the last key tile.
        ((1, 9), (64, 100), {"window": 16, "extent": 100}),
        ((1, 1), (64, 128), {"window": 64, "extent": 64}),
        ((300, 1), (900, 5), {"extent": 200, "dtype": torch.float16}),
        ((65,), (129,), {"extent": 40, "head_dim": 64}),
        ((150, 16), (300, 16), {"extent": 100}),
    ],
)
def test_rows_of_the_bias_that_were_never_written_are_never_read(
    monkeypatch, q_lens, kv_lens, options
):
    """The tensor cores of sm90 add a bias tile up: a NaN next to what a row may see would reach
    every row of the tile."""
    options = {"head_dim": 128, "page_size": 64, "dtype": torch.bfloat16, "heads": 2, **options}
    host = make_problem(q_lens, kv_lens, **options)
    problem = host.to("cuda")
    allocate = prefill.allocate_rows

    def poisoned(*args):
        return allocate(*args).fill_(float("nan"))

    monkeypatch.setattr(prefill, "allocate_rows", poisoned)
    out = attention_prefill(
        problem.q, problem.k_pages, problem.v_pages, cu_seqlens_q=problem.cu_seqlens_q,
        q_start=problem.q_start, score_mod=problem.bias, **problem.paged,
    )  # fmt: skip
    assert within_budget(host, out.cpu())


@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize(("kv_heads", "window"), [(1, 0), (2, 512)])
def test_batch_mates_change_no_bit(tokens, kv_heads, window):
    """The table's rows: alone a request's units go to a program each, among 47 others in groups."""
    lengths = tuple(2000 - 37 * b for b in range(48))
    problem = make_problem(
        (tokens,) * 48, lengths, heads=8, kv_heads=kv_heads, head_dim=128, page_size=128,
        window=window, extent=512, dtype=torch.bfloat16,
    ).to("cuda")  # fmt: skip

    def call(b, count):
        first, last = b * tokens, (b + count) * tokens
        bias = RelativeBias(
            r=problem.bias.r[first:last],
            profile=problem.bias.profile,
            tau=problem.bias.tau[first:last],
        )
        cut = ("page_table", "first_page", "kv_len")
        paged = {n: v[b : b + count] if n in cut else v for n, v in problem.paged.items()}
        shared = {"score_mod": bias, "max_kv_len": 8192, "return_lse": True, **paged}
        tensors = (problem.q[first:last], problem.k_pages, problem.v_pages)
        if tokens == 1:
            return attention_decode(*tensors, **shared)
        starts = problem.cu_seqlens_q[: count + 1]
        return attention_verify(*tensors, cu_seqlens_q=starts, max_q_len=tokens, **shared)

    out, lse = call(0, 48)
    for b in range(0, 48, 7):
        one = slice(b * tokens, (b + 1) * tokens)
        alone, alone_lse = call(b, 1)
        assert torch.equal(alone, out[one])
        assert torch.equal(alone_lse, lse[one])


@pytest.mark.parametrize(("extent", "biased"), [(100, True), (1024, True), (1024, False)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_lens", "window", "page_size"),
    [
        # Two warp groups, the second without rows in most requests.
        (8, 1, (9, 5, 0, 1, 9, 2), 0, 128),
        (16, 2, (9, 5, 0, 1, 9, 2), 0, 64),
        (4, 1, (9, 5, 0, 1, 9, 2), 0, 64),  # one warp group, tokens in two products
        (8, 1, (16, 5, 0, 1, 16, 2), 0, 128),  # every row of both
        (8, 2, (9, 5, 0, 1, 9, 2), 512, 128),
        (8, 2, (9, 5, 0, 1, 9, 2), 64, 64),
        (8, 2, (5, 3, 0, 1, 5, 2), 512, 64),
        (8, 2, (12, 5, 0, 1, 12, 2), 130, 128),
        (8, 2, (4, 3, 0, 1, 4, 2), 512, 128),  # an ordinary tile
    ],
)
def test_verify_of_many_rows(heads, kv_heads, q_lens, window, page_size, extent, biased):
    """sm90 packs the rows of a request and K/V head into one tile (hopper_verify.py for 33 to 128,
    hopper_window.py): ragged tokens, requests of one part and of many, programs of several items,
    all sides of the extent."""
    most = max(q_lens)
    q_lens, kv_lens = 8 * q_lens, 8 * (1700, 700, 4, most, most + 1, 513)
    host = make_problem(
        q_lens, kv_lens, heads=heads, kv_heads=kv_heads, head_dim=128, page_size=page_size,
        window=window, extent=extent, dtype=torch.bfloat16,
    )  # fmt: skip
    problem = host.to("cuda")
    mod = problem.bias if biased else None
    shared = {"max_q_len": most, "max_kv_len": 1700, "return_lse": True, **problem.paged}
    tensors = (problem.q, problem.k_pages, problem.v_pages)
    out, lse = attention_verify(
        *tensors, cu_seqlens_q=problem.cu_seqlens_q, score_mod=mod, **shared
    )
    host_mod = host.bias if biased else None
    assert within_budget(host, out.cpu(), host_mod)
    _, want = reference(host, host_mod)
    ulps = 4 * torch.finfo(torch.bfloat16).eps
    assert (lse.cpu() - want).abs().max() < ulps * want.abs().max()
    # Alone or among fewer others, with the same bound on the tokens, the bits are the same.
    for count in (1, 12):
        rows, bias = slice(0, sum(q_lens[:count])), problem.bias
        bias = RelativeBias(r=bias.r[rows], profile=bias.profile, tau=bias.tau[rows])
        cut = {n: v[:count] for n, v in problem.paged.items() if isinstance(v, torch.Tensor)}
        some, some_lse = attention_verify(
            problem.q[rows], *tensors[1:], cu_seqlens_q=problem.cu_seqlens_q[: count + 1],
            score_mod=bias if biased else None, **{**shared, **cut, "max_kv_len": 4096},
        )  # fmt: skip
        assert torch.equal(some, out[rows])
        assert torch.equal(some_lse, lse[rows])
