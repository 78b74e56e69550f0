"""DFlash: a small decoder that fills a block of masked positions in one forward.

    features(p) = [tap of target layer l_1 ; of l_2 ; ...] at position p
    c(p)        = rms_norm_hidden(fc features(p))             the context: confirmed positions p < n
    x           = embed[t_n, mask, mask, ...]                 the block: positions n, n + 1, ...
    layer:        x += o attention(rms_norm(x));  x += down(silu(gate y) * up y), y = rms_norm(x)
    drafts      = head(rms_norm_final(x)) at the masked positions

In every layer the queries are the block's; keys and values are k = rope(rms_norm_k(W_k y)),
v = W_v y with y = c(p) for the context and y = rms_norm(x) for the block itself. c does not depend
on the layer, so a confirmed position's keys and values are computed once and kept (`DraftCache`);
the block's own are never stored: a rejected draft leaves nothing behind. Embedding (as stored,
without the target's norm) and head are the target's. Source: arXiv:2602.06036; the wiring is the
one SGLang 0.5.23 serves Inkling drafts with.

Taps: ops/residual_conv_norm.py. Plain torch on every device: no kernel of ours, no graph. Letters:
M positions of a block, S of the context, F width of the features, P pages of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.config_dflash import DFlashConfig
from inkling_rocm.ops.rms_norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class DraftCache:
    """Keys and values of confirmed positions, in pages shared with the target's global layers.

    Attributes:
        storage: [draft layers, 2, pages, page_size, g, D]; page 0 is the sink.
    """

    storage: Tensor

    @property
    def page_size(self) -> int:
        return self.storage.shape[3]

    def write(self, layer: int, slots_T: Tensor, k_TgD: Tensor, v_TgD: Tensor) -> None:
        """Store tokens at flat slots page * page_size + offset, int64 [T]; 0 = dropped."""
        for side, x in enumerate((k_TgD, v_TgD)):
            self.storage[layer, side].flatten(0, 1)[slots_T] = x

    def read(
        self, layer: int, page_table_BP: Tensor, context_len_B: Tensor, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a block at position context_len may see, window 0 = everything.

        Returns: k, v [B, S, g, D] and their positions int64 [B, S]. Entries at or after context_len
            are undefined.
        """
        size, P = self.page_size, page_table_BP.shape[1]
        first_B = torch.zeros_like(context_len_B)
        columns = P
        if window:
            first_B = (context_len_B - (window - 1)).clamp(min=0) // size
            columns = min(P, max(window - 3, 0) // size + 2)  # pages that W - 1 positions touch
        column_BC = first_B[:, None] + torch.arange(columns, device=first_B.device)
        pages_BC = page_table_BP.long().gather(1, column_BC.clamp(max=P - 1))
        offset = torch.arange(size, device=first_B.device)
        positions_BS = (column_BC[:, :, None] * size + offset).flatten(1)
        k, v = (x[pages_BC].flatten(1, 2) for x in self.storage[layer])
        return k, v, positions_BS


class DFlashModel:
    """The draft model of one rank; every rank holds all of it.

    Args: weights: parameters by the names of checkpoint/dflash.py.
    """

    def __init__(self, config: DFlashConfig, weights: Mapping[str, Tensor]):
        self.config = config
        self.weights = weights

    def write_context(
        self, features_TF: Tensor, positions_T: Tensor, slots_T: Tensor, cache: DraftCache
    ) -> None:
        """Keys and values of the context at these positions, from the target's features.

        Args:
            features_TF: [T, target layers * H], the taps side by side in the layers' order.
            positions_T: integer [T]. slots_T: int64 [T], see DraftCache.write.
        In place: cache.
        """
        config, w = self.config, self.weights
        eps, heads = config.rms_norm_eps, (config.num_kv_heads, config.head_dim)
        context_TH = rms_norm(F.linear(features_TF, w["fc"]), w["hidden_norm"], eps)
        cos_sin = self._cos_sin(positions_T)
        first = config.num_heads * config.head_dim  # rows of qkv: the keys' and values' only
        for layer in range(config.num_layers):
            kv_TgD = F.linear(context_TH, w[f"layers.{layer}.qkv"][first:]).unflatten(
                -1, (-1, heads[1])
            )
            k_TgD, v_TgD = kv_TgD.split(heads[0], dim=1)
            k_TgD = _rotate(rms_norm(k_TgD, w[f"layers.{layer}.k_norm"], eps), *cos_sin)
            cache.write(layer, slots_T, k_TgD, v_TgD)

    def forward(
        self, x_BMH: Tensor, context_len_B: Tensor, page_table_BP: Tensor, cache: DraftCache
    ) -> Tensor:
        """One forward of a block in each row.

        Args:
            x_BMH: embeddings of [token sampled last, mask, mask, ...].
            context_len_B: int64 [B], confirmed positions: where the block begins; the context at
                all of them has been written.
            page_table_BP: [B, P], pages of positions 0 .. context_len - 1 and maybe more.
        Returns: [B, M, H] after the final norm, before the target's muP division.
        """
        config, w = self.config, self.weights
        eps = config.rms_norm_eps
        M = x_BMH.shape[1]
        positions_BM = context_len_B[:, None] + torch.arange(M, device=x_BMH.device)
        cos_sin = self._cos_sin(positions_BM)
        for layer in range(config.num_layers):
            name = f"layers.{layer}."
            normed_BMH = rms_norm(x_BMH, w[name + "attn_norm"], eps)
            heads_BMhD = F.linear(normed_BMH, w[name + "qkv"]).unflatten(-1, (-1, config.head_dim))
            q, k, v = heads_BMhD.split(
                (config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=2
            )
            q = _rotate(rms_norm(q, w[name + "q_norm"], eps), *cos_sin)
            k = _rotate(rms_norm(k, w[name + "k_norm"], eps), *cos_sin)
            out_BMhD = self._attend(layer, q, k, v, positions_BM, page_table_BP, cache)
            x_BMH = x_BMH + F.linear(out_BMhD.flatten(2), w[name + "o_proj"])
            normed_BMH = rms_norm(x_BMH, w[name + "mlp_norm"], eps)
            gate, up = F.linear(normed_BMH, w[name + "gate_up"]).chunk(2, dim=-1)
            x_BMH = x_BMH + F.linear(F.silu(gate) * up, w[name + "down"])
        return rms_norm(x_BMH, w["final_norm"], eps)

    def _attend(
        self,
        layer: int,
        q_BMhD: Tensor,
        k_BMgD: Tensor,
        v_BMgD: Tensor,
        positions_BM: Tensor,
        page_table_BP: Tensor,
        cache: DraftCache,
    ) -> Tensor:
        """Attention of the block to the context and itself, [B, M, h, D]."""
        config = self.config
        window, causal = config.windows[layer], config.causal[layer]
        start_B = positions_BM[:, 0]
        past_k, past_v, past_BS = cache.read(layer, page_table_BP, start_B, window)
        keys_BK = torch.cat((past_BS, positions_BM), dim=1)
        distance_BMK = positions_BM[:, :, None] - keys_BK[:, None]
        is_context_K = torch.arange(keys_BK.shape[1], device=start_B.device) < past_BS.shape[1]
        visible_BMK = ~is_context_K | (keys_BK < start_B[:, None])[:, None]
        if window:
            visible_BMK = visible_BMK & (distance_BMK < window)
        if causal:
            visible_BMK = visible_BMK & (distance_BMK >= 0)
        # What nobody sees may be anything, NaN included.
        known = visible_BMK.any(1)[:, :, None, None]
        k = torch.cat((past_k, k_BMgD), dim=1).where(known, 0)
        v = torch.cat((past_v, v_BMgD), dim=1).where(known, 0)
        out_BhMD = F.scaled_dot_product_attention(
            q_BMhD.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible_BMK.expand(-1, q_BMhD.shape[1], -1)[:, None],
            scale=config.softmax_scale,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        return out_BhMD.transpose(1, 2)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rotary angles at positions [...]: fp32 [..., 1, D / 2], for any head."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device)
        frequency = self.config.rope_theta ** (-half.float() / self.config.head_dim)
        angle = (positions[..., None].float() * frequency)[..., None, :]
        return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) of the last dimension, in fp32 or better, rounded once."""
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
