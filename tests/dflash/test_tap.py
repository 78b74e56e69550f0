"""What InklingModel.forward hands out to a block drafter."""

import pytest
import torch

from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from inkling_rocm.parity.watch import watched
from kernel_base.arch import arch_named
from tests.engine.tiny import tiny_config, tiny_model
from tests.support.plain_host import PlainHost, Row

TOKENS = [5, 17, 3, 90, 41, 41, 8, 2, 77]
H = tiny_config().text.hidden_size


def forward(model, chunks, layers):
    """Hidden states and taps, [T, H] each, of TOKENS fed in these chunks."""
    host, start, hidden, tapped = PlainHost(tiny_config(), num_requests=1, max_len=16), 0, [], []
    for length in chunks:
        host.prepare([Row(1, start, length)])
        buffer = torch.full((length, 3 * H), float("nan"))
        taps = {layer: buffer[:, layer * H : (layer + 1) * H] for layer in layers}
        hidden.append(model.forward(torch.tensor(TOKENS[start : start + length]), host, taps))
        tapped.append(buffer)
        start += length
    return torch.cat(hidden), torch.cat(tapped).split(H, dim=1)


def second_seams(chunks):
    """(reduced MLP output, residual stream) that enter each layer's last short convolution."""
    seen: dict[str, list] = {}

    def listen(site, op, function, args, kwargs):
        if site.endswith("mlp.residual_conv_norm"):
            seen.setdefault(site, []).append((args[0].clone(), args[1].clone()))
        return function(*args, **kwargs)

    config = tiny_config()
    ops = watched(resolve_ops(config, arch_named("cpu"), dtype="float32"), listen)
    forward(InklingModel(config, tiny_model(config).weights, ops), chunks, ())
    layers = [seen[f"{i}.mlp.residual_conv_norm"] for i in range(3)]
    return [tuple(map(torch.cat, zip(*calls, strict=True))) for calls in layers]


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [(9,), (1, 2, 3, 3), (1,) * 9])
def test_a_tap_is_the_stream_before_the_last_convolution(chunks):
    plain, untouched = forward(tiny_model(tiny_config()), chunks, ())
    assert all(x.isnan().all() for x in untouched)
    for layers in ((0, 1, 2), (2,), (0,)):
        hidden, taps = forward(tiny_model(tiny_config()), chunks, layers)
        assert torch.equal(hidden, plain)
        for layer, (mlp, residual) in enumerate(second_seams(chunks)):
            if layer in layers:
                assert torch.equal(taps[layer], mlp + residual)
            else:
                assert taps[layer].isnan().all()


@torch.inference_mode()
def test_the_oracle_can_fail():
    """Another layer's tap and the stream without the MLP's output are something else."""
    _, taps = forward(tiny_model(tiny_config()), (9,), (0, 1, 2))
    mlp, residual = second_seams((9,))[1]
    assert torch.equal(taps[1], mlp + residual)
    assert not torch.allclose(taps[1], residual, rtol=1e-2)
    assert not torch.allclose(taps[1], taps[2], rtol=1e-2)
