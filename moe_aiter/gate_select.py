"""Selection of the gate: logits from the router's partial sums, experts, weights.

Top-k is a repeated maximum of integers in the scores' order: integers, because their maxima take
one instruction a wave. A token's experts are BLOCK_X // PART tensors of PART columns, which are as
many as one wave loads at a time: so each wave has tokens of its own and waits for no other.

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
def _sum_slices(ptrs, mask, tokens, pitch, SLICES: tl.constexpr):
    """Logits: the slices' partial sums [slice, token, expert], added in order, the first at
    ptrs."""
    # The programs that wrote these ran on other compute units: read past this one's L1.
    logits = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    # Unrolled: all the loads leave before the first is awaited.
    for _ in tl.static_range(1, SLICES):
        ptrs += tokens * pitch
        logits += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return logits


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
    lanes = tl.arange(0, PART)[None, :]
    w = tl.arange(0, BLOCK_W)[None, :]
    mask_t = t < tokens
    biases = ()
    for i in tl.static_range(BLOCK_X // PART):
        x = i * PART + lanes
        # Every wave loads its tokens' bias, instead of handing it on through shared memory.
        ptrs = tl.broadcast_to(bias_ptr + x, [BLOCK_T, PART])
        biases += (tl.load(ptrs, mask=x < num_experts, other=0.0),)  # type: ignore[assignment]
    scale = route_scale * tl.load(scale_ptr)
    if AWAIT:
        await_arrivals(count_ptr, wanted)
    rows = partial_ptr + t[:, None].to(tl.int64) * pitch
    logits = ()
    for i in tl.static_range(BLOCK_X // PART):
        x = i * PART + lanes
        mask = mask_t[:, None] & (x < num_experts)
        logits += (_sum_slices(rows + x, mask, tokens, pitch, SLICES),)  # type: ignore[assignment]
    used = mask_t[:, None] & (w < TOP_K + SHARED)
    # Columns past K become the shared experts'.
    chosen = tl.zeros([BLOCK_T, BLOCK_W], tl.int32) + (num_experts - TOP_K + w)
    mask = used & (w >= TOP_K)
    chosen_logits = _sum_slices(rows + chosen, mask, tokens, pitch, SLICES)
    # Integers in the scores' order (no score is -0). The lowest marks what may not be chosen
    # (again).
    keys = ()
    for i in tl.static_range(BLOCK_X // PART):
        # A NaN score ranks last.
        score = tl.maximum(tl.sigmoid(logits[i]) + biases[i], LOWEST)
        bits = score.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys += (tl.where(i * PART + lanes < num_experts, key, NEVER),)  # type: ignore[assignment]
    for k in tl.static_range(TOP_K):
        largest = keys[0]  # type: ignore[misc]
        for i in tl.static_range(1, BLOCK_X // PART):
            largest = tl.maximum(largest, keys[i])
        best = tl.max(largest, 1)[:, None]
        least = tl.where(keys[0] == best, lanes, BLOCK_X)  # type: ignore[misc]
        for i in tl.static_range(1, BLOCK_X // PART):
            least = tl.minimum(least, tl.where(keys[i] == best, i * PART + lanes, BLOCK_X))
        expert = tl.min(least, 1)[:, None]
        left = ()
        # The logit of the one expert, as bits: an integer's maximum, like the others.
        logit = tl.zeros([BLOCK_T, PART], tl.int32) + NEVER
        for i in tl.static_range(BLOCK_X // PART):
            here = i * PART + lanes == expert
            left += (tl.where(here, NEVER, keys[i]),)  # type: ignore[assignment]
            logit = tl.where(here, logits[i].to(tl.int32, bitcast=True), logit)
        keys = left
        chosen = tl.where(w == k, expert, chosen)
        found = tl.max(logit, 1)[:, None].to(tl.float32, bitcast=True)
        chosen_logits = tl.where(w == k, found, chosen_logits)
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
