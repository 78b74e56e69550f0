"""What verify over warp groups shares (hopper_verify.py, hopper_window.py): which keys an item has,
the producer that copies its operands, and the scores that they give.

The bias is the product of decode_kernels.py: r of the row's token, laid out block-diagonally, times
the profile by key. The producer copies both operands, zeros included, to shared memory. The first
TOKENS tokens have one product and MORE others a second: that of the second warp group, or where one
has all rows, of what does not fit 128 columns.
"""

# Compile-time and run-time conditions do not mix.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma

from kernel_base.hopper_copy import row_load
from triton_attn.score_mod import PROFILE_PAD, RelativeBias

# Query rows of a consumer and of a request; columns of a features' product.
HALF_ROWS, MAX_ROWS, MAX_FEATURES = 64, 128, 128
# Longer windows are too many tiles for the merge of hopper_window.py.
MAX_WINDOW = 1024


def feature_tokens(group: int, max_q_len: int, block_r: int) -> tuple[int, int]:
    """Tokens of the first and (0: there is none) second features' product, powers of two. Two warp
    groups have one each; one has the second where its tokens are more than a product is wide."""
    first = min(triton.next_power_of_2(max_q_len), HALF_ROWS // group, MAX_FEATURES // block_r)
    rest = max_q_len - first
    return first, triton.next_power_of_2(rest) if rest > 0 else 0


def bias_arguments(bias: RelativeBias | None) -> tuple[tuple, tuple, dict[str, int | bool]]:
    """What a launch takes of a bias or of none: (r, profile by key, tau), the strides of r by token
    and head, and the constants."""
    if bias is None:
        constants = {"BIASED": False, "EXTENT": 1, "PAD": PROFILE_PAD, "BLOCK_R": 16}
        return (None, None, None), (0, 0), constants
    by_key = bias.profile.by_key
    block_r = by_key.shape[1]
    constants = {"BIASED": True, "EXTENT": bias.extent, "PAD": PROFILE_PAD, "BLOCK_R": block_r}
    return (bias.r, by_key, bias.tau), bias.r.stride()[:2], constants


def fits(
    group: int,
    max_q_len: int,
    page_size: int,
    head_dim: int,
    window: int,
    bias: RelativeBias | None,
) -> bool:
    """Whether hopper_verify.py (or with a window hopper_window.py) can take such a call: key tiles
    lie in one page, tokens do not straddle warp groups, and the features of a warp group's tokens
    fit two products."""
    most_rows = HALF_ROWS if window else MAX_ROWS
    if HALF_ROWS % group or group * max_q_len > most_rows or window > MAX_WINDOW:
        return False
    if page_size % 64 or head_dim != 128:
        return False
    if bias is None:
        return True
    block_r = bias.profile.by_key.shape[1]
    if bias.r.shape[2] != block_r or block_r > MAX_FEATURES:
        return False
    first, more = feature_tokens(group, max_q_len, block_r)
    if window:  # whose sums take the shared memory of another 64 columns
        return more * block_r <= MAX_FEATURES // 2
    mine = first == HALF_ROWS // group or group * max_q_len <= HALF_ROWS
    return mine and more * block_r <= MAX_FEATURES


@gluon.jit
def item(
    turn, cu_seqlens_q_ptr, kv_len_ptr, pairs, most_parts, kv_heads, WINDOW: gl.constexpr,
    SPLIT: gl.constexpr, MAX_PARTS: gl.constexpr,
):  # fmt: skip
    """Item of round `turn`: request, K/V head, part, first token, q_len (0: no item), position of
    the first token, first key, end of the keys. Last units, which have the bias, come first.
    Windows are whole (SPLIT 0; each part has all keys), or parts of SPLIT keys from the end."""
    index = turn * gl.num_programs(0) + gl.program_id(0)
    here = index < pairs * most_parts
    pair = index % pairs
    request = pair // kv_heads
    token0 = gl.load(cu_seqlens_q_ptr + request)
    q_len = gl.load(cu_seqlens_q_ptr + request + 1) - token0
    kv_len = gl.load(kv_len_ptr + request)
    q_start = kv_len - q_len
    if WINDOW == 0:
        unit = SPLIT * gl.maximum(gl.cdiv(kv_len, SPLIT * MAX_PARTS), 1)
        part = gl.maximum(gl.cdiv(kv_len, unit), 1) - 1 - index // pairs
        begin = part * unit
        end = gl.minimum(begin + unit, kv_len)
    else:
        part = index // pairs
        begin = gl.maximum(q_start - WINDOW + 1, 0)
        end = kv_len
        if SPLIT > 0:
            top = gl.maximum(kv_len - 1, 0) // SPLIT - part
            here = (index < pairs * most_parts) & (top >= begin // SPLIT)
            begin = gl.maximum(begin, top * SPLIT)
            end = gl.minimum(kv_len, (top + 1) * SPLIT)
    q_len = gl.where(here & (part >= 0), q_len, 0)
    return request, pair % kv_heads, part, token0, q_len, q_start, begin, end


@gluon.jit
def tiles(
    q_start, begin, end, BIASED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(bottom, low, top): numbers of an item's lowest and highest key tile; tiles below `low` have
    neither masks nor bias. The highest is always treated as if it had both."""
    bottom = begin // BLOCK_N
    top = gl.maximum((end - 1) // BLOCK_N, bottom)
    low = (q_start + 1) // BLOCK_N
    if BIASED:
        low = gl.maximum(q_start - EXTENT + 1, 0) // BLOCK_N
    low = gl.maximum(gl.minimum(low, top), bottom)
    if WINDOW > 0:
        low = bottom
    return bottom, low, top


@gluon.jit
def _copy_features(
    f_tile, r_row_ptr, kv_head, q_len, stride_r_t: gl.constexpr, stride_r_h: gl.constexpr,
    GROUP: gl.constexpr, ROW0: gl.constexpr, FIRST: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_R: gl.constexpr,
):  # fmt: skip
    """[64, TOKENS * BLOCK_R] for rows ROW0, ...: r of a row's token in the columns of that token,
    zeros elsewhere; tokens FIRST, ..., later ones in earlier columns."""
    width: gl.constexpr = TOKENS * BLOCK_R
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    i = ROW0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, width, gl.SliceLayout(0, layout))
    token = i // GROUP
    owner = (FIRST + TOKENS - 1) - cols // BLOCK_R
    mine = (token[:, None] == owner[None, :]) & (token < q_len)[:, None]
    ptrs = r_row_ptr + (token * stride_r_t + (kv_head * GROUP + i % GROUP) * stride_r_h)[:, None]
    row_load(f_tile, ptrs + (cols % BLOCK_R)[None, :], mask=mine)


@gluon.jit
def _copy_profile(
    p_tile, by_key_ptr, n0, q_start, EXTENT: gl.constexpr, PAD: gl.constexpr, FIRST: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The profile that those tokens see at keys n0 ..., [BLOCK_N, TOKENS * BLOCK_R]; rows of it
    overlap in memory."""
    width: gl.constexpr = TOKENS * BLOCK_R
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    cols = gl.arange(0, width, gl.SliceLayout(0, layout))
    first_row = n0 - q_start + (EXTENT + PAD - TOKENS - FIRST)
    ptrs = by_key_ptr + first_row * BLOCK_R
    # The highest tile may lie beyond the extent, and off the profile.
    near = (n0 + n + EXTENT > q_start - BLOCK_N)[:, None]
    row_load(p_tile, ptrs + n[:, None] * BLOCK_R + cols[None, :], mask=near)


@gluon.jit
def produce(
    q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
    kv_len_ptr, pairs, most_parts, kv_heads, stride_q_t: gl.constexpr, stride_q_h: gl.constexpr,
    stride_k_p: gl.constexpr, stride_k_t: gl.constexpr, stride_k_g: gl.constexpr,
    stride_v_p: gl.constexpr, stride_v_t: gl.constexpr, stride_v_g: gl.constexpr, stride_page_b,
    stride_r_t: gl.constexpr, stride_r_h: gl.constexpr, q_smem, f_smem, f_more, k_smem, v_smem,
    p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_ready, p_free,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, PAD: gl.constexpr, WINDOW: gl.constexpr,
    GROUP: gl.constexpr, HALVES: gl.constexpr, TOKENS: gl.constexpr, MORE: gl.constexpr,
    BLOCK_R: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, P_STAGES: gl.constexpr, SPLIT: gl.constexpr, MAX_PARTS: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """STEP 2: every second tile of a window, from the part's number on."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    count = 0
    biased = 0
    done = 0
    for turn in range(gl.cdiv(pairs * most_parts, gl.num_programs(0))):
        request, kv_head, part, token0, q_len, q_start, begin, end = item(
            turn, cu_seqlens_q_ptr, kv_len_ptr, pairs, most_parts, kv_heads, WINDOW, SPLIT,
            MAX_PARTS,
        )  # fmt: skip
        if q_len > 0:
            page_row_ptr = (
                page_table_ptr
                + request.to(gl.int64) * stride_page_b
                - gl.load(first_page_ptr + request)
            )
            mbarrier.wait(q_free.index(0), (done & 1) ^ 1)
            row0 = token0.to(gl.int64)
            q_row_ptr = q_ptr + row0 * stride_q_t + kv_head * GROUP * stride_q_h
            for half in gl.static_range(HALVES):
                i = half * 64 + offs_m
                q_offs = (i // GROUP) * stride_q_t + (i % GROUP) * stride_q_h
                row_load(
                    q_smem.index(half),
                    q_row_ptr + q_offs[:, None] + offs_d[None, :],
                    mask=(i < q_len * GROUP)[:, None],
                )
            if BIASED:
                r_row_ptr = r_ptr + row0 * stride_r_t
                _copy_features(
                    f_smem.index(0), r_row_ptr, kv_head, q_len, stride_r_t, stride_r_h, GROUP, 0, 0,
                    TOKENS, BLOCK_R,
                )  # fmt: skip
                if MORE > 0:
                    _copy_features(
                        f_more.index(0), r_row_ptr, kv_head, q_len, stride_r_t, stride_r_h, GROUP,
                        (HALVES - 1) * 64, TOKENS, MORE, BLOCK_R,
                    )  # fmt: skip
            async_copy.mbarrier_arrive(q_ready.index(0), increment_count=False)
            done += 1
            bottom, low, top = tiles(q_start, begin, end, BIASED, EXTENT, WINDOW, BLOCK_N)
            first = top
            if STEP == 2:
                first = top - part
            for back in range((first - bottom + STEP) // STEP):
                tile = first - back * STEP
                n0 = tile * BLOCK_N
                n = n0 + offs_n
                mask = ((n >= begin) & (n < end))[:, None]
                stage = count % STAGES
                phase = (count // STAGES) & 1
                page = gl.load(page_row_ptr + n0 // PAGE_SIZE).to(gl.int64)
                in_page = n0 % PAGE_SIZE
                k_base = k_ptr + page * stride_k_p + in_page * stride_k_t + kv_head * stride_k_g
                v_base = v_ptr + page * stride_v_p + in_page * stride_v_t + kv_head * stride_v_g
                k_ptrs = k_base + (offs_n * stride_k_t)[:, None] + offs_d[None, :]
                v_ptrs = v_base + (offs_n * stride_v_t)[:, None] + offs_d[None, :]
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                row_load(k_smem.index(stage), k_ptrs, mask=mask)
                async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
                if BIASED:
                    if (tile >= low) | (back == 0):
                        p_stage = biased % P_STAGES
                        mbarrier.wait(p_free.index(p_stage), ((biased // P_STAGES) & 1) ^ 1)
                        _copy_profile(
                            p_smem.index(p_stage), by_key_ptr, n0, q_start, EXTENT, PAD, 0, TOKENS,
                            BLOCK_R, BLOCK_N,
                        )  # fmt: skip
                        if MORE > 0:
                            _copy_profile(
                                p_more.index(p_stage), by_key_ptr, n0, q_start, EXTENT, PAD, TOKENS,
                                MORE, BLOCK_R, BLOCK_N,
                            )  # fmt: skip
                        async_copy.mbarrier_arrive(p_ready.index(p_stage), increment_count=False)
                        biased += 1
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                row_load(v_smem.index(stage), v_ptrs, mask=mask)
                async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
                count += 1


@gluon.jit
def start_scores(
    q, f, f_more, k_smem, p_smem, p_more, k_ready, p_ready, count, biased,
    MORE: gl.constexpr, BIASED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    P_STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start q.k and (with BIASED, else a copy of q.k's handle) features.profile of one tile."""
    stage = count % STAGES
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    b = s
    if BIASED:
        p_stage = biased % P_STAGES
        mbarrier.wait(p_ready.index(p_stage), (biased // P_STAGES) & 1)
        profile = p_smem.index(p_stage).permute((1, 0))
        b = warpgroup_mma(f, profile, zero, use_acc=False, is_async=True)
        if MORE > 0:
            profile = p_more.index(p_stage).permute((1, 0))
            b = warpgroup_mma(f_more, profile, b, is_async=True)
    return s, b


@gluon.jit
def feature_tiles(
    none, P_STAGES: gl.constexpr, BIASED: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Shared memory of the features and of the profile for TOKENS tokens; `none` twice without."""
    f_tiles = none
    p_tiles = none
    if BIASED and TOKENS > 0:
        width: gl.constexpr = TOKENS * BLOCK_R
        bytes: gl.constexpr = 128 if width >= 64 else 2 * width
        layout: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=bytes, element_bitwidth=16, rank=2
        )
        dtype: gl.constexpr = none.dtype
        f_tiles = gl.allocate_shared_memory(dtype, [1, 64, width], layout)
        p_tiles = gl.allocate_shared_memory(dtype, [P_STAGES, BLOCK_N, width], layout)
    return f_tiles, p_tiles
