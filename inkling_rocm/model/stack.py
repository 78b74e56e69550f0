"""The language model: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from torch import Tensor

from inkling_rocm.config import InklingConfig
from inkling_rocm.host import Host
from inkling_rocm.model.layer import Layer
from inkling_rocm.ops.registry import OpSet


class InklingModel:
    """The text model of one tensor-parallel rank.

    Args:
        weights: parameters by the names of the weight table (checkpoint/table.py), this rank's
            shards. Entries that a variant's preparation takes over are deleted.
        ops: the chosen op implementations.
        first_expert: see Layer.
    """

    def __init__(
        self,
        config: InklingConfig,
        weights: MutableMapping[str, Tensor],
        ops: OpSet,
        tp_size: int = 1,
        first_expert: int | None = None,
    ):
        text = config.text
        self.config = config
        self.weights = weights
        self.ops = ops
        self.layers = [
            Layer(
                index,
                text,
                text.attention(index),
                text.layer_is_moe[index],
                below(weights, f"layers.{index}."),
                ops,
                tp_size,
                first_expert,
            )
            for index in range(text.num_layers)
        ]
        norms = [layer.weights["attn_norm"] for layer in self.layers]
        self.next_norms = [*norms[1:], weights["final_norm"]]
        self.prepare()

    def prepare(self) -> None:
        """Let the ops' variants derive what they want from the weights, layer by layer; to be
        called again when weights have changed in place.

        Raises: ValueError: a variant cannot use these weights.
        """
        for layer in self.layers:
            names = set(layer.weights)
            layer.prepare()
            for name in names - set(layer.weights):
                del self.weights[f"layers.{layer.index}.{name}"]

    def forward(
        self, input_ids: Tensor, host: Host, taps: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Hidden states after the final norm, before the muP division.

        Args:    input_ids: int64 [T]. taps: by layer number, where a block drafter wants that
                 layer's features: [T, H] in the model dtype, rows may be strided; they get the
                 residual stream plus the layer's MLP output as it is before its short convolution.
        Returns: [T, H] in the model dtype.
        """
        text, w = self.config.text, self.weights
        residual_TH = self.ops.embed(
            input_ids, w["embed"], w["embed_norm"], eps=text.rms_norm_eps, comm=host.comm
        )
        normed_TH = self.ops.rms_norm(
            residual_TH, self.layers[0].weights["attn_norm"], text.rms_norm_eps
        )
        taps = taps or {}
        for layer, next_norm_H in zip(self.layers, self.next_norms, strict=True):
            normed_TH, residual_TH = layer.forward(
                normed_TH, residual_TH, next_norm_H, host, taps.get(layer.index)
            )
        return normed_TH

    def logits(self, hidden_nH: Tensor, host: Host) -> Tensor:
        """Scores of the real tokens.

        Args:    hidden_nH: [n, H] rows of forward's result.
        Returns: fp32 [n, unpadded_vocab_size].
        """
        text = self.config.text
        return self.ops.lm_head(
            hidden_nH,
            self.weights["lm_head"],
            mup_multiplier=text.mup_multiplier,
            vocab_size=text.unpadded_vocab_size,
            comm=host.comm,
        )


def below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The parameters whose names start with prefix, without it."""
    start = len(prefix)
    return {name[start:]: w for name, w in weights.items() if name.startswith(prefix)}
