"""Launches whose programs wait for others of the same launch, beside launches of other streams: all
end, with the bits that they have alone."""

from __future__ import annotations

import pytest
import torch

from inkling_rocm.kernels.linear import linear, make_tickets
from kernel_base.arch import arch_of_device
from moe_aiter import experts
from moe_aiter.gate import GateWorkspace, gate

pytestmark = pytest.mark.gpu

# A rank of eight of the large model: hidden size, columns of the first product, experts, top-k,
# shared experts, expert width.
H, COLUMNS, X, K, S, I = 6144, 1664, 256, 6, 2, 384
TOKENS = (8, 33, 128, 170)
STREAMS, TURNS = 3, 200


class DecodeLayer:
    """A recorded graph of a layer's first product, gate and experts, with counters of its own."""

    def __init__(self, weights: dict[str, torch.Tensor], tokens: int, seed: int):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x = torch.randn(tokens, H, device="cuda", generator=generator).bfloat16()
        self.weights, self.arch = weights, arch_of_device("cuda:0")
        self.workspace = GateWorkspace.allocate(self.x.device)
        self.tickets = make_tickets(self.x.device)
        self.outputs = (
            torch.empty(min(tokens, 128), COLUMNS, dtype=torch.bfloat16, device="cuda"),
            torch.empty(tokens, K, dtype=torch.int32, device="cuda"),
            torch.empty(tokens, K + S, device="cuda"),
            torch.empty(tokens, H, dtype=torch.bfloat16, device="cuda"),
        )
        self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()

    def _run(self) -> None:
        product, ids, gamma, out = self.outputs
        w = self.weights
        linear(
            self.x[: len(product)], w["product"], arch=self.arch.name, out=product,
            tickets=self.tickets,
        )  # fmt: skip
        gate(
            self.x, w["gate"], w["bias"], w["scale"], top_k=K, route_scale=8.0, ids_out=ids,
            weights_out=gamma, workspace=self.workspace,
        )  # fmt: skip
        names = ("w13", "w2", "shared_w13", "shared_w2")
        experts(self.x, ids, gamma, **{name: w[name] for name in names}, out=out)

    def replay(self) -> None:
        """On the current stream, over poisoned outputs."""
        for output in self.outputs:
            output.fill_(float("nan") if output.is_floating_point() else -1)
        self._graph.replay()


def make_weights() -> dict[str, torch.Tensor]:
    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype) * shape[-1] ** -0.5

    torch.manual_seed(0)
    return {
        "product": random(COLUMNS, H), "gate": random(X + S, H),
        "bias": torch.zeros(X, device="cuda"), "scale": torch.ones(1, device="cuda"),
        "w13": random(X, 2 * I, H), "w2": random(X, H, I),
        "shared_w13": random(S, 2 * I, H), "shared_w2": random(S, H, I),
    }  # fmt: skip


def test_streams_side_by_side():
    weights = make_weights()
    layers = [[DecodeLayer(weights, tokens, n) for tokens in TOKENS] for n in range(STREAMS)]
    alone = []
    for layer in (layer for own in layers for layer in own):
        layer.replay()
        torch.cuda.synchronize()
        alone.append([output.clone() for output in layer.outputs])
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    busy, large = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda").bfloat16()
    room = torch.empty_like(large)
    torch.cuda.synchronize()
    for turn in range(TURNS):
        for own, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                own[turn % len(TOKENS)].replay()
        with torch.cuda.stream(busy):
            torch.mm(large, large, out=room)
    torch.cuda.synchronize()
    for layer, before in zip((layer for own in layers for layer in own), alone, strict=True):
        for output, expected in zip(layer.outputs, before, strict=True):
            assert torch.equal(output, expected)
        assert not layer.workspace.tickets.any()
        assert not layer.tickets.any()
