"""What prefill, decode and verify share on a key tile: page look-up, masks, one online-softmax
step."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(
    ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_page, stride_tok,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_N, BLOCK_D] at positions n0 .. n0 + BLOCK_N - 1 (n0 a multiple of
    BLOCK_N).

    With MASKED, positions outside [first_key, end_key) are not touched and read as 0 (a page slot
    that was never
    written may hold NaN, and 0 * NaN is NaN). Pages are reached with 64-bit arithmetic.
    """
    n = n0 + offs_n
    if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page: one look-up
        page = tl.load(page_row_ptr + n0 // PAGE_SIZE).to(tl.int64)
        base = ptr + page * stride_page + (n0 % PAGE_SIZE) * stride_tok
        ptrs = base + offs_n[:, None] * stride_tok + offs_d[None, :]
    else:
        in_range = (n >= first_key) & (n < end_key)
        page = tl.load(page_row_ptr + n // PAGE_SIZE, mask=in_range, other=0).to(tl.int64)
        row = page * stride_page + (n % PAGE_SIZE) * stride_tok
        ptrs = ptr + row[:, None] + offs_d[None, :]
    if MASKED:
        mask = ((n >= first_key) & (n < end_key))[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (offs_d < HEAD_DIM)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)
    if HEAD_DIM != BLOCK_D:
        return tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def visible_keys(q_pos, n, end_key, WINDOW: tl.constexpr):
    """[rows, keys]: key n is at or before q_pos, inside the window (current key counted), and
    exists."""
    ok = (n[None, :] <= q_pos[:, None]) & (n < end_key)[None, :]
    if WINDOW > 0:
        ok = ok & (n[None, :] > q_pos[:, None] - WINDOW)
    return ok


@triton.jit
def softmax_step(acc, l, m, s, v):
    """Fold scores s (log2 units, -inf = hidden) and values v into the running (acc, l, m).

    m starts finite (-1e30), so a wholly hidden tile adds exp2(-inf - m) = 0 and never NaN.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    a = tl.exp2(m - m_new)
    l = l * a + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision="ieee")
    return acc, l, m_new


@triton.jit
def find_request(block, cu_seqlens_q_ptr, num_requests, BLOCK_M: tl.constexpr):
    """The request that owns query block `block` when request b's blocks start at cu[b] // BLOCK_M
    + b."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    return low
