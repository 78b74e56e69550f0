"""Score modifications: what may happen to a score between q.k and the softmax.

A `ScoreMod` is a `@triton.jit` function that the kernels inline, plus what they must know to skip
work. `RelativeBias`
is the one modification the kernels know by name: its bias never exists as a [tokens, heads,
extent] tensor.
Write your own as in `alibi` below; docs/attention.md has a worked example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Copies of a profile, each shifted one column further, so that any slice of it starts at a
# multiple of 8 in one of them.
SHIFTS = 16
# Zero columns on both sides of a shifted profile: tiles may stick out of the extent by a key tile
# and a verify block.
PROFILE_PAD = 256


@dataclass(frozen=True, kw_only=True)
class ScoreMod:
    """A modification of the scaled score, inlined into every kernel at compile time.

    Attributes:
        fn: `@triton.jit` function (score, q_pos, k_pos, q_token, head, aux) -> score. Score is
        fp32, natural-log
            units, [rows, keys]; q_pos, q_token and head are [rows, 1], k_pos is [1, keys]; aux is
            the tuple
            below. Return -inf to hide a key. q_token and head are always valid indices; k_pos may
            lie beyond the
            keys, so loads through it need a mask.
        reference: the same in torch: (score [h, q, n], q_pos [q], k_pos [n], q_token [q], aux) ->
        [h, q, n].
        aux: tensors that `fn` reads.
        extent: `fn` is the identity at distances q_pos - k_pos >= extent, so such tiles skip it;
        None = never.
        may_mask: `fn` may return -inf for every key of a row; such a row's output is 0 and its LSE
        -inf.
    """

    fn: Callable
    reference: Callable
    aux: tuple[torch.Tensor, ...] = ()
    extent: int | None = None
    may_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class RelativeProfile:
    """A bias projection P [R, E], prepared once per layer (weights only) for aligned reads.

    Attributes:
        projection: P [R, extent]: the bias at distance e of a query with features r is r . P[:, e].
        table: [16, R padded to a power of two >= 16, pitch]: P reversed (column c holds distance
        E-1-c), copy s
            shifted right by PROFILE_PAD + s columns, zeros around; what prefill reads.
        by_key: [pitch, R padded]: P reversed and transposed, row PROFILE_PAD + c holds distance
            E-1-c, zeros around; what decode and verify read.
    """

    projection: torch.Tensor
    table: torch.Tensor
    by_key: torch.Tensor

    @staticmethod
    def prepare(projection_RE: torch.Tensor) -> RelativeProfile:
        """Lay `projection_RE` [R, E] out for the kernels; do this when weights are loaded."""
        d_rel, extent = projection_RE.shape
        rows = max(16, triton.next_power_of_2(d_rel))
        pitch = triton.cdiv(extent + 2 * PROFILE_PAD + SHIFTS, 16) * 16
        table = projection_RE.new_zeros(SHIFTS, rows, pitch)
        for shift in range(SHIFTS):
            first = PROFILE_PAD + shift
            table[shift, :d_rel, first : first + extent] = projection_RE.flip(-1)
        by_key = table[0].T.contiguous()
        return RelativeProfile(projection=projection_RE, table=table, by_key=by_key)

    @property
    def extent(self) -> int:
        return self.projection.shape[1]


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """bias[t, h, n] = tau[t] * r[t, h, :] . P[:, t - n] for distances inside the extent, 0 beyond.

    Attributes:
        r: [T, h, R] per-query features, last dim contiguous, the dtype of q.
        profile: the prepared P [R, E].
        tau: [T] fp32 factor per token, or None for 1. Multiplied in fp32, after the product.
    """

    r: torch.Tensor
    profile: RelativeProfile
    tau: torch.Tensor | None = None

    @property
    def extent(self) -> int:
        return self.profile.extent


@triton.jit
def _alibi(score, q_pos, k_pos, q_token, head, aux):
    slope = tl.load(aux[0] + head)
    return score - slope * (q_pos - k_pos).to(tl.float32)


def _alibi_reference(score, q_pos, k_pos, q_token, aux):
    distance = (q_pos[:, None] - k_pos[None, :]).to(score.dtype)
    return score - aux[0].to(score.dtype)[:, None, None] * distance


def alibi(slopes_h: torch.Tensor) -> ScoreMod:
    """ALiBi (arXiv:2108.12409): minus slope times distance. `slopes_h` [h] fp32."""
    return ScoreMod(fn=_alibi, reference=_alibi_reference, aux=(slopes_h,))


@triton.jit
def _softcap(score, q_pos, k_pos, q_token, head, aux):
    cap = tl.load(aux[0])
    # tanh through exp, written so that it cannot overflow; libdevice differs between vendors.
    x = score / cap
    e = tl.exp(-2.0 * tl.abs(x))
    tanh = (1.0 - e) / (1.0 + e)
    return cap * tl.where(x < 0, -tanh, tanh)


def _softcap_reference(score, q_pos, k_pos, q_token, aux):
    cap = aux[0].to(score.dtype)
    return cap * torch.tanh(score / cap)


def softcap(cap_1: torch.Tensor) -> ScoreMod:
    """Logit soft-capping: cap * tanh(score / cap). `cap_1` is one fp32 element on the device."""
    return ScoreMod(fn=_softcap, reference=_softcap_reference, aux=(cap_1,))
