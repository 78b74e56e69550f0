"""One decoder layer: seven ops."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from inkling_rocm.config import AttentionConfig, TextConfig
from inkling_rocm.host import ConvStream, Host
from inkling_rocm.ops.registry import OpSet

# None to a variant whose preparation took them over.
EXPERT_WEIGHTS = ("w13", "w2", "shared_w13", "shared_w2")


def rank_attention(attention: AttentionConfig, tp_size: int) -> AttentionConfig:
    """The head counts of one tensor-parallel rank; K/V heads are replicated when there are more
    ranks."""
    return replace(
        attention,
        num_heads=attention.num_heads // tp_size,
        num_kv_heads=max(attention.num_kv_heads // tp_size, 1),
    )


def rank_text(text: TextConfig, tp_size: int) -> TextConfig:
    """The language model as one rank's pools and rings see it: with the rank's head counts.

    Raises: ValueError: heads that the ranks cannot share.
    """
    for name in ("local_attention", "global_attention"):
        attention = getattr(text, name)
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
            raise ValueError(
                f"tensor parallel size {tp_size} does not fit the {name}'s {heads} query heads and "
                f"{kv_heads} kv heads: it must divide the former, and divide or be a multiple of "
                f"the latter"
            )
    return replace(
        text,
        local_attention=rank_attention(text.local_attention, tp_size),
        global_attention=rank_attention(text.global_attention, tp_size),
    )


class Layer:
    """Weights and constants of one layer of the stack.

    Args:
        index: the layer's number, as the host counts it.
        attention: of this layer, for the whole model. is_moe: experts instead of a dense MLP.
        weights: this layer's parameters by their names below "layers.{i}.".
        first_expert: id of this rank's first routed expert under expert parallelism, else None.
    """

    def __init__(
        self,
        index: int,
        text: TextConfig,
        attention: AttentionConfig,
        is_moe: bool,
        weights: MutableMapping[str, Tensor],
        ops: OpSet,
        tp_size: int,
        first_expert: int | None = None,
    ):
        self.index = index
        self.text = text
        self.attention = rank_attention(attention, tp_size)
        self.is_moe = is_moe
        self.weights = weights
        self.ops = ops
        # Not passed to variants that refuse expert parallelism.
        self.expert_range = {} if first_expert is None else {"first_expert": first_expert}
        self.rel_attention, self.gate, self.experts = ops.rel_attention, ops.gate, ops.experts

    def prepare(self) -> None:
        """Let the variants derive what they want from this layer's weights."""
        for op in ("rel_attention", *(("gate", "experts") if self.is_moe else ())):
            if prepare := self.ops.prepares.get(op):
                setattr(self, op, partial(getattr(self.ops, op), prepared=prepare(self.weights)))

    def attend(self, normed_TH: Tensor, host: Host) -> Tensor:
        """Attention output before the all-reduce, [T, H]."""
        w, ops = self.weights, self.ops
        kv = host.kv(self.index)
        qkvr = ops.linear(normed_TH, w["attn.qkvr"])
        q_ThD, r_ThR = ops.attention_prologue(
            qkvr,
            attention=self.attention,
            k_conv=w["attn.k_conv"],
            v_conv=w["attn.v_conv"],
            q_norm=w["attn.q_norm"],
            k_norm=w["attn.k_norm"],
            eps=self.text.rms_norm_eps,
            meta=host.meta,
            kv=kv,
            k_ring=host.conv(self.index, "k"),
            v_ring=host.conv(self.index, "v"),
        )
        out_ThD = self.rel_attention(
            q_ThD, r_ThR, w["attn.rel_proj"], attention=self.attention, meta=host.meta, kv=kv
        )
        return ops.linear(out_ThD.flatten(1), w["attn.o_proj"])

    def mlp(self, normed_TH: Tensor, host: Host) -> Tensor:
        """MLP or MoE output before the all-reduce, [T, H]."""
        w, ops = self.weights, self.ops
        if not self.is_moe:
            return ops.dense_mlp(normed_TH, w["mlp.gate_up"], w["mlp.down"], w["mlp.global_scale"])
        topk_ids, topk_weights = self.gate(
            normed_TH,
            w["moe.gate_weight"],
            w["moe.gate_bias"],
            w["moe.global_scale"],
            moe=self.text.moe,
        )
        host.capture_routing(self.index, topk_ids)
        return self.experts(
            normed_TH,
            topk_ids,
            topk_weights,
            **{name: w.get(f"moe.{name}") for name in EXPERT_WEIGHTS},
            **self.expert_range,
        )

    def forward(
        self,
        normed_TH: Tensor,
        residual_TH: Tensor,
        next_norm_H: Tensor,
        host: Host,
        tap_TH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args: normed_TH: the residual stream, normed by this layer's attn_norm; next_norm_H: the
            weight that norms this layer's result: the next layer's attn_norm, or the final norm;
            tap_TH: gets the tap of this layer's second residual_conv_norm.
        Returns: (normed, residual), both [T, H].
        """
        w = self.weights
        halves: tuple[tuple[ConvStream, Callable, Tensor], ...] = (
            ("attn", self.attend, w["mlp_norm"]),
            ("mlp", self.mlp, next_norm_H),
        )
        for stream, branch, norm_H in halves:
            # Not passed where it is not wanted: watchers of ops see the usual calls.
            tap = {"tap_TH": tap_TH} if stream == "mlp" and tap_TH is not None else {}
            normed_TH, residual_TH = self.ops.residual_conv_norm(
                branch(normed_TH, host),
                residual_TH,
                conv_WH=w[f"{stream}_conv"],
                norm_H=norm_H,
                eps=self.text.rms_norm_eps,
                meta=host.meta,
                ring=host.conv(self.index, stream),
                comm=host.comm,
                **tap,
            )
        return normed_TH, residual_TH
