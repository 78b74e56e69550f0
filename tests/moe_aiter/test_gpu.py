"""On a GPU: the benchmark's correctness gate over sizes and edges, and the models' shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from bench.moe.gate import check, layer_passes, small_cases
from bench.moe.problems import EXPERTS, SHARED, TOP_K, make_layer, make_weights
from bench.moe.timing import count_launches
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningRow
from moe_aiter import GateWorkspace, experts, gate
from moe_aiter.problems import make_gate_problem, make_problem
from moe_aiter.reference import gate_reference, weigh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def ours(call):
    return experts(
        call.x, call.ids, call.gamma, **call.weights, out=torch.full_like(call.x, float("nan"))
    )


def test_small_cases():
    failed = [
        f"{name}: {error:.2g}, eager {eager:.2g}"
        for name, passed, error, eager in small_cases()
        if not passed
    ]
    assert not failed


@pytest.fixture(scope="module")
def weights():
    yield make_weights("inkling-tp8")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("shared", [0, SHARED], ids=["routed", "with shared"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 32, 128, 1024, 2048, 8192])
def test_inkling_rank(weights, tokens, shared):
    layer = make_layer("inkling-tp8", tokens, weights, shared)
    passed, error, eager = layer_passes(ours, layer)
    assert passed, f"error {error:.2g}, eager {eager:.2g}"
    first = ours(layer.calls[0])
    assert torch.equal(first, ours(layer.calls[0]))


@pytest.mark.parametrize("skewed", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("tokens", [9, 43, 64, 170])
def test_few_choices(weights, tokens, skewed):
    """Two launches, whose second adds up while others of its programs run: every replay alike."""
    layer = make_layer("inkling-tp8", tokens, weights, SHARED, skewed=skewed)
    passed, error, eager = layer_passes(ours, layer)
    assert passed, f"error {error:.2g}, eager {eager:.2g}"
    assert count_launches(lambda: ours(layer.calls[0])) == 3  # and the poison
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [ours(call) for call in layer.calls]
    wanted = [ours(call) for call in layer.calls]
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_tokens_that_all_choose_the_same(weights):
    """Experts of eight row blocks and experts of none."""
    layer = make_layer("inkling-tp8", 128, weights, SHARED)
    for call in layer.calls:
        call.ids.copy_(call.ids[:1].expand_as(call.ids).clone())
    passed, error, eager = layer_passes(ours, layer)
    assert passed, f"error {error:.2g}, eager {eager:.2g}"


def test_capture(weights):
    """Every way through can be captured, and a replay computes what an eager call does."""
    for tokens in (1, 32, 128, 1024, 8192):
        call = make_layer("inkling-tp8", tokens, weights, SHARED).calls[0]
        want = ours(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours(call)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("tokens", [1, 4, 16, 32, 128, 4096, 8192])
def test_launches_that_start_early_see_what_came_before(weights, tokens):
    """Some launches start before the one ahead of them has ended (launch_pdl). A chain that writes
    x, routes it and runs the experts, over the same buffers for every round, gives what each round
    gives by itself."""
    layer = make_layer("inkling-tp8", tokens, weights, SHARED)
    router = make_gate_problem(tokens, experts=256, hidden=layer.calls[0].x.shape[1], device="cuda")
    workspace = GateWorkspace.allocate(router.x.device)
    x, out = torch.empty_like(router.x), torch.empty_like(router.x)
    ids = torch.zeros(tokens, 6, dtype=torch.int32, device="cuda")
    gamma = torch.zeros(tokens, 8, device="cuda")

    def call(index):
        x.copy_(layer.calls[index].x)
        gate(
            x, router.weight, router.bias, router.global_scale, top_k=6, route_scale=8.0,
            ids_out=ids, weights_out=gamma, workspace=workspace,
        )  # fmt: skip
        experts(x, ids, gamma, **weights, out=out)
        return out.clone()

    wanted = []
    for index in range(len(layer.calls)):
        wanted.append(call(index))
        torch.cuda.synchronize()
    assert len({float(want.float().norm()) for want in wanted}) == len(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(index) for index in range(len(wanted))]
    for _ in range(3):
        graph.replay()
        for index, want in enumerate(wanted):
            assert torch.equal(found[index], want), f"round {index}"


@pytest.mark.parametrize("shared", [0, SHARED], ids=["routed", "with shared"])
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_uneven_routing(weights, tokens, shared):
    """Experts with three blocks, experts with a few rows."""
    layer = make_layer("inkling-tp8", tokens, weights, shared, skewed=True)
    passed, error, eager = layer_passes(ours, layer)
    assert passed, f"error {error:.2g}, eager {eager:.2g}"
    first = ours(layer.calls[0])
    assert all(torch.equal(first, ours(layer.calls[0])) for _ in range(3))


@pytest.mark.parametrize("shared", [0, SHARED], ids=["routed", "with shared"])
@pytest.mark.parametrize(
    ("tokens", "first"),
    [(100, 8), (100, 200), (600, 8), (3000, 8), (3000, 0), (4096, 200)],
    ids=[
        "looked up",
        "looked up, no local expert",
        "sorted in one launch",
        "in two",
        "the first experts",
        "no local expert",
    ],
)
def test_a_range_of_experts_with_many_rows(tokens, first, shared):
    """Ranks of an expert-parallel model: blocks of 256 rows, ids of other ranks among them, ragged
    last blocks, experts without a row, an expert with many blocks."""
    problem = make_problem(
        tokens, experts=24, top_k=6, shared=shared, hidden=256, width=192, device="cuda"
    )
    if first < 24:
        problem.ids[problem.ids == first + 3] = first + 4  # not distinct: ids need not be
        problem.ids[: tokens // 2, 0] = first + 1
    weights = {
        name: w[first : first + 16] if name in ("w13", "w2") and first < 24 else w
        for name, w in problem.weights.items()
    }
    call = replace(problem, weights=weights)
    out = torch.full_like(call.x, float("nan"))
    got = experts(call.x, call.ids, call.gamma, **weights, first_expert=first, out=out)
    want, eager = (call.reference(d, first_expert=first) for d in (torch.float64, torch.bfloat16))
    if first == 200 and not shared:
        assert not got.any()
        return
    passed, error, budget = check(got, want, eager)
    assert passed, f"error {error:.2g}, eager {budget:.2g}"


@pytest.mark.parametrize(
    "tokens", [1, 16, 17, 33, 65, 129, 257, 512, 513, 600, 2049, 4097, 8192, 8200]
)
def test_gate_by_the_tables_rows(tokens):
    """At the width of the model, in one launch and in two, one slice of the depth or several,
    ragged token blocks."""
    p = make_gate_problem(tokens, experts=EXPERTS, hidden=6144, device="cuda")
    arguments = (p.x, p.weight, p.bias, p.global_scale)
    out = torch.full((tokens, TOP_K + SHARED), float("nan"), device="cuda")
    ids, weights = gate(*arguments, top_k=TOP_K, route_scale=8.0, weights_out=out)
    want_ids, _ = gate_reference(*arguments, top_k=TOP_K, route_scale=8.0)
    # Scores closer than fp32 rounding may swap places.
    assert float((ids == want_ids).float().mean()) > 0.999
    logits = F.linear(p.x.double(), p.weight.double())
    want = weigh(logits, ids, EXPERTS, 8.0 * p.global_scale.double())
    # One chain of fp32 additions over the depth.
    chain = torch.finfo(torch.float32).eps * 6144**0.5
    assert float((weights.double() - want).norm() / want.norm()) < chain
    again = gate(*arguments, top_k=TOP_K, route_scale=8.0)
    assert torch.equal(ids, again[0])
    assert torch.equal(weights, again[1])


def one_launch(block_m: int, warps: int) -> TuningRow:
    """A row whose selection waits in programs behind the products, whatever the tables say."""
    sizes = {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 64, "SLICE": 512, "BEHIND": warps}
    return TuningRow(
        arch=arch_of_device("cuda:0").name, constexprs=sizes,
        options={"num_warps": warps, "num_stages": 4}, evidence="guess", source="this test",
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 5, 33, 64, 65, 130, 512])
@pytest.mark.parametrize(("block_m", "warps"), [(16, 4), (64, 8)])
def test_waiting_selection_is_that_of_two_launches(tokens, block_m, warps):
    """Bitwise, eagerly and in every replay, alone and while another stream takes multiprocessors
    away. Rounds alternate between inputs: partial sums read too early are those of the other."""
    p = make_gate_problem(tokens, experts=EXPERTS, hidden=6144, device="cuda")
    inputs = (p.x, p.x.flip(1))
    workspace = GateWorkspace.allocate(p.x.device)
    row = one_launch(block_m, warps)
    two = {name: value for name, value in row.constexprs.items() if name != "BEHIND"}

    def call(index, row):
        ids = torch.full((tokens, TOP_K), -1, dtype=torch.int32, device="cuda")
        weights = torch.full((tokens, TOP_K + SHARED), float("nan"), device="cuda")
        return gate(
            inputs[index % 2], p.weight, p.bias, p.global_scale, top_k=TOP_K, route_scale=8.0,
            ids_out=ids, weights_out=weights, workspace=workspace, rows=(row, None),
        )  # fmt: skip

    def right(index, found):
        return all(torch.equal(*pair) for pair in zip(found, want[index % 2], strict=True))

    want = [call(index, replace(row, constexprs=two)) for index in range(2)]
    assert not torch.equal(want[0][1], want[1][1])
    assert all(right(index, call(index, row)) for index in range(4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(index, row) for index in range(8)]
    other, big = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for busy in (False, True) * 8:
        if busy:
            with torch.cuda.stream(other):
                for _ in range(4):
                    big @ big
        graph.replay()
        torch.cuda.current_stream().synchronize()
        assert all(right(index, pair) for index, pair in enumerate(found))
    assert not workspace.tickets.any(), "the kernel leaves the counters as it found them"


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gate_with_more_weights_than_experts(tokens, dtype):
    """K + S past the next power of two of X, as a tiny model has it."""
    p = make_gate_problem(tokens, experts=8, shared=3, hidden=48, dtype=dtype, device="cuda")
    arguments = (p.x, p.weight, p.bias, p.global_scale)
    ids, weights = gate(*arguments, top_k=6, route_scale=8.0)
    want_ids, want = gate_reference(*arguments, top_k=6, route_scale=8.0)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)
