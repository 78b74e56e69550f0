"""What the project knows of a checkpoint's config.json: frozen dataclasses, without the reading.

Import them from `inkling_rocm.config`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One kind of attention layer.

    Attributes:
        num_heads, num_kv_heads: query and key/value heads of the whole model (before tensor
            parallelism).
        head_dim: D. The softmax scale is 1 / head_dim.
        d_rel: R, width of the relative feature r of a head.
        extent: E, distances 0 .. extent-1 get a bias, others none.
        window: visible keys including the current one; 0 = all earlier keys.
        log_floor: position from which tau grows; None = tau is 1 (always so in local layers).
        log_alpha: tau(p) = 1 + log_alpha * ln(max((p + 1) / log_floor, 1)).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_rel: int
    extent: int
    window: int
    log_floor: int | None
    log_alpha: float

    @property
    def softmax_scale(self) -> float:
        return 1.0 / self.head_dim


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The shared-sink mixture of experts: X routed experts (top-K of them a token) and S shared
    ones."""

    num_experts: int
    top_k: int
    num_shared_experts: int
    intermediate_size: int
    route_scale: float


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The language model.

    Attributes:
        vocab_size: rows of embed and lm_head (padded); unpadded_vocab_size: rows that are real
            tokens.
        conv_taps: W, taps of every short convolution, the current token included.
        dense_intermediate_size: width of the dense MLP; the experts' is moe.intermediate_size.
        mup_multiplier: the final hidden state is divided by it before the head.
        layer_is_local, layer_is_moe: one flag a layer.
        moe: None when every layer is dense.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    unpadded_vocab_size: int
    context_length: int
    rms_norm_eps: float
    conv_taps: int
    dense_intermediate_size: int
    mup_multiplier: float
    local_attention: AttentionConfig
    global_attention: AttentionConfig
    layer_is_local: tuple[bool, ...]
    layer_is_moe: tuple[bool, ...]
    moe: MoEConfig | None

    def attention(self, layer: int) -> AttentionConfig:
        """The attention of one layer."""
        return self.local_attention if self.layer_is_local[layer] else self.global_attention


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """The chained draft blocks; every one has a dense MLP."""

    num_blocks: int
    block_is_local: tuple[bool, ...]
    chain_hidden_post_norm: bool


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """The audio tower: one embedding row for each (mel bin, level) pair."""

    num_mel_bins: int
    num_levels: int


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The hMLP vision tower."""

    patch_size: int
    temporal_patch_size: int
    num_channels: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class InklingConfig:
    """Everything config.json says.

    Attributes:
        dtype: "bfloat16", "float16" or "float32": what the checkpoint's weights are meant to run
            in.
        eos_token_ids: ids that end a turn.
    """

    text: TextConfig
    mtp: MTPConfig | None
    audio: AudioConfig | None
    vision: VisionConfig | None
    dtype: str
    eos_token_ids: tuple[int, ...]
