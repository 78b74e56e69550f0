"""The chained draft blocks (multi-token prediction): small layers with weights of their own that
share the model's embedding and head.

    c    = input_proj([rms_norm(h_prev, hidden_norm) ; rms_norm(embedded, embed_norm)])
    h    = block(c)                        with chain_hidden_post_norm: rms_norm(h, chain_norm)
    logits = head(h)                       the model's head, muP division included

At depth m and position p, h_prev is what depth m - 1 gave at p (depth 0: the model's hidden state
after its final norm) and `embedded` is the model's normed embedding of the token at p + m + 1: the
logits predict the token at p + m + 2. To a host, depth m is layer `num_layers + m`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch
from torch import Tensor

from inkling_rocm.config import InklingConfig, TextConfig
from inkling_rocm.host import Host
from inkling_rocm.model.layer import Layer
from inkling_rocm.model.stack import InklingModel, below


def text_with_drafts(config: InklingConfig, depths: int) -> TextConfig:
    """The language model as its pools and rings see it when the first `depths` draft blocks run
    too: with one more dense layer for each.

    Raises: ValueError: the checkpoint has fewer blocks.
    """
    blocks = 0 if config.mtp is None else config.mtp.num_blocks
    if depths > blocks:
        raise ValueError(
            f"{depths} draft steps were asked for, but this checkpoint's config.json has {blocks} "
            "draft blocks (mtp_config.num_nextn_predict_layers)"
        )
    text = config.text
    if not depths:
        return text
    assert config.mtp is not None
    return replace(
        text,
        num_layers=text.num_layers + depths,
        layer_is_local=text.layer_is_local + config.mtp.block_is_local[:depths],
        layer_is_moe=text.layer_is_moe + (False,) * depths,
    )


class DraftBlocks:
    """The first `depths` draft blocks of a model, on one tensor-parallel rank.

    Args:
        weights: parameters "mtp.*" by the names of the weight table, this rank's shards.
    """

    def __init__(
        self,
        model: InklingModel,
        weights: MutableMapping[str, Tensor],
        depths: int,
        tp_size: int = 1,
    ):
        config = model.config
        text = text_with_drafts(config, depths)
        self.model = model
        self.depths = depths
        self._eps = text.rms_norm_eps
        self._weights = [below(weights, f"mtp.{m}.") for m in range(depths)]
        self._chain_norm = weights.get("mtp.chain_norm")
        first = config.text.num_layers
        self._layers = [
            Layer(
                first + m,
                text,
                text.attention(first + m),
                False,
                below(weights, f"mtp.{m}.block."),
                model.ops,
                tp_size,
            )
            for m in range(depths)
        ]
        self.prepare()

    def prepare(self) -> None:
        """See InklingModel.prepare."""
        for layer in self._layers:
            layer.prepare()

    def forward(self, depth: int, input_ids: Tensor, hidden_TH: Tensor, host: Host) -> Tensor:
        """One depth over the tokens of a host's forward.

        Args:
            input_ids: int64 [T], the token at position + depth + 1 of each token.
            hidden_TH: [T, H], the result of the depth before, or the model's forward.
        Returns: [T, H], for the next depth and for `InklingModel.logits`.
        """
        w, model, ops, layer = self._weights[depth], self.model, self.model.ops, self._layers[depth]
        embedded_TH = ops.embed(
            input_ids,
            model.weights["embed"],
            model.weights["embed_norm"],
            eps=self._eps,
            comm=host.comm,
        )
        both = (
            ops.rms_norm(hidden_TH, w["hidden_norm"], self._eps),
            ops.rms_norm(embedded_TH, w["embed_norm"], self._eps),
        )
        residual_TH = ops.linear(torch.cat(both, -1), w["input_proj"])
        normed_TH = ops.rms_norm(residual_TH, layer.weights["attn_norm"], self._eps)
        # The norm that ends a layer is the next layer's; a block's result goes on without one.
        end_norm = layer.weights["attn_norm"] if self._chain_norm is None else self._chain_norm
        normed_TH, residual_TH = layer.forward(normed_TH, residual_TH, end_norm, host)
        return residual_TH if self._chain_norm is None else normed_TH
