"""A draft block against a layer of transformers and the wiring written out."""

from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.loader import load_weights
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import MTPConfig, load_config
from inkling_rocm.model import DraftBlocks, InklingModel
from inkling_rocm.model.mtp import text_with_drafts
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named
from tests.parity.oracle import generated_config, oracle_model
from tests.support.plain_host import PlainHost, Row

LENGTH = 30


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """A transformers model whose two layers, one of each kind, play draft blocks; its files."""
    arguments = generated_config("faults") | {
        "num_hidden_layers": 2,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "dense"],
    }
    theirs = oracle_model(arguments, "blocks")
    folder = tmp_path_factory.mktemp("trunk")
    theirs.save_pretrained(folder)
    return theirs.model.language_model, folder


def our_blocks(folder, chained):
    """Draft blocks that hold the checkpoint's layers, and norms and projections of their own."""
    config = load_config(folder)
    mtp = MTPConfig(
        num_blocks=2, block_is_local=config.text.layer_is_local, chain_hidden_post_norm=chained
    )
    config = replace(config, mtp=mtp)
    weights = allocate(config, dtype=torch.float32, device="cpu")
    load_weights(folder, replace(config, mtp=None), weights, progress=False)
    drafts = allocate(config, dtype=torch.float32, device="cpu", parts=("mtp",))
    fill_dummy(config, drafts, seed=5)
    for name, tensor in weights.items():
        if name.startswith("layers."):
            layer, rest = name.removeprefix("layers.").split(".", 1)
            drafts[f"mtp.{layer}.block.{rest}"].copy_(tensor)
    weights |= drafts
    model = InklingModel(config, weights, resolve_ops(config, arch_named("cpu"), dtype="float32"))
    return config, weights, DraftBlocks(model, weights, 2)


@pytest.mark.parametrize("chained", [False, True])
@torch.no_grad()
def test_blocks_are_layers_behind_a_projection(trunk, chained):
    theirs, folder = trunk
    config, w, blocks = our_blocks(folder, chained)
    text = config.text
    torch.manual_seed(0)
    ids = torch.randint(text.unpadded_vocab_size, (LENGTH,))
    hidden = torch.randn(LENGTH, text.hidden_size)
    host = PlainHost(
        replace(config, text=text_with_drafts(config, 2)), num_requests=1, max_len=LENGTH
    )
    host.prepare([Row(1, 0, LENGTH)])
    embedded = rms_norm(w["embed"][ids], w["embed_norm"], text.rms_norm_eps)
    for depth in range(2):
        both = (
            rms_norm(hidden, w[f"mtp.{depth}.hidden_norm"], text.rms_norm_eps),
            rms_norm(embedded, w[f"mtp.{depth}.embed_norm"], text.rms_norm_eps),
        )
        combined = torch.cat(both, -1) @ w[f"mtp.{depth}.input_proj"].T
        want = layer_of(theirs, depth, combined)
        if chained:
            want = rms_norm(want, w["mtp.chain_norm"], text.rms_norm_eps)
        got = blocks.forward(depth, ids, hidden, host)
        assert (got - want).norm() / want.norm() < 1e-5
        hidden = got


def layer_of(theirs, index, inputs):
    """One layer of a transformers model, its mask as the model makes it."""
    captured = {}
    layer = theirs.layers[index]

    def capture(module, args, kwargs):
        captured.update(kwargs)

    handle = layer.register_forward_pre_hook(capture, with_kwargs=True)
    theirs(inputs_embeds=inputs[None], use_cache=False)
    handle.remove()
    return layer(inputs[None], **captured)[0]
