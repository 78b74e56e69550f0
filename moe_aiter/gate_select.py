"""Selection of the gate: logits from the router's partial sums, experts, weights.

Top-k is a repeated maximum of integers in the scores' order: integers, because their maxima take
one instruction a wave. The layout is such that a wave has whole tokens where it can: a token's
experts are [BLOCK_X // PART, PART], and PART of them are as many as one wave loads at a time.

logsigmoid(l) = min(l, 0) - log(1 + exp(-|l|)) is finite for any logit, so the weights stay right
where all sigmoids underflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_base.device import await_arrivals

# The lowest finite fp32.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NEVER = tl.constexpr(-(2**31))


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sum_slices(partial_ptr, rows, columns, mask, tokens, pitch, SLICES: tl.constexpr):
    """Logits at rows and columns: the slices' partial sums [slice, token, expert], added in
    order."""
    ptrs = partial_ptr + rows.to(tl.int64) * pitch + columns
    # The programs that wrote these ran on other compute units: read past this one's L1.
    logits = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    # Unrolled: all the loads leave before the first is awaited.
    for _ in tl.static_range(1, SLICES):
        ptrs += tokens * pitch
        logits += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return logits


@triton.jit
def _over_experts(values, LARGEST: tl.constexpr):
    """The largest (or least) of a token's values: int32 [parts, tokens, PART] -> [tokens]."""
    if LARGEST:
        return tl.max(tl.max(values, 0), 1)
    return tl.min(tl.min(values, 0), 1)


@triton.jit
def select_tokens(
    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, count_ptr, wanted, t0, tokens,
    num_experts, route_scale, stride_ids, pitch,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, SLICES: tl.constexpr, AWAIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Experts and weights of tokens t0 .. t0 + BLOCK_T - 1; with AWAIT once `wanted` programs have
    arrived at count_ptr."""
    t = t0 + tl.arange(0, BLOCK_T)
    x = (tl.arange(0, BLOCK_X // PART) * PART)[:, None, None] + tl.arange(0, PART)[None, None, :]
    w = tl.arange(0, BLOCK_W)[None, :]
    mask_t = t < tokens
    inside = x < num_experts
    # Every wave loads all of it, instead of handing it on through shared memory.
    bias_ptrs = tl.broadcast_to(bias_ptr + x, [BLOCK_X // PART, BLOCK_T, PART])
    bias = tl.load(bias_ptrs, mask=inside, other=0.0)
    scale = route_scale * tl.load(scale_ptr)
    if AWAIT:
        await_arrivals(count_ptr, wanted)
    mask = mask_t[None, :, None] & inside
    logits = _sum_slices(partial_ptr, t[None, :, None], x, mask, tokens, pitch, SLICES)
    used = mask_t[:, None] & (w < TOP_K + SHARED)
    # Columns past K become the shared experts'.
    chosen = tl.zeros([BLOCK_T, BLOCK_W], tl.int32) + (num_experts - TOP_K + w)
    chosen_logits = _sum_slices(
        partial_ptr, t[:, None], chosen, used & (w >= TOP_K), tokens, pitch, SLICES
    )
    # A NaN score ranks last.
    score = tl.maximum(tl.sigmoid(logits) + bias, LOWEST)
    # Integers in the scores' order (no score is -0). The lowest marks what may not be chosen
    # (again).
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)
    logit_bits = logits.to(tl.int32, bitcast=True)
    for k in tl.static_range(TOP_K):
        best = _over_experts(key, True)
        expert = _over_experts(tl.where(key == best[None, :, None], x, BLOCK_X), False)
        here = x == expert[None, :, None]
        key = tl.where(here, NEVER, key)
        # One expert is left: the maximum is its logit.
        logit = _over_experts(tl.where(here, logit_bits, NEVER), True).to(tl.float32, bitcast=True)
        chosen = tl.where(w == k, expert[:, None], chosen)
        chosen_logits = tl.where(w == k, logit[:, None], chosen_logits)
    tl.store(ids_ptr + t[:, None] * stride_ids + w, chosen, mask=mask_t[:, None] & (w < TOP_K))
    logs = tl.where(w < TOP_K + SHARED, _log_sigmoid(chosen_logits), float("-inf"))
    powers = tl.exp(logs - tl.max(logs, 1)[:, None])
    weights = powers / tl.sum(powers, 1)[:, None] * scale
    tl.store(weights_ptr + t[:, None] * (TOP_K + SHARED) + w, weights, mask=used)


@triton.jit(do_not_specialize=("tokens", "stride_ids"))
def _select_kernel(
    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, tokens, num_experts, route_scale,
    stride_ids, pitch,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    select_tokens(
        ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, None, 0, tl.program_id(0) * BLOCK_T,
        tokens, num_experts, route_scale, stride_ids, pitch,
        SHARED, TOP_K, SLICES, False, BLOCK_T, BLOCK_X, BLOCK_W, PART,
    )  # fmt: skip
