"""Which block a program of the Hopper prefill works on when; shared by its warp groups."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _find_request(block, cu_seqlens_q_ptr, num_requests, BLOCK_M: gl.constexpr):
    """As tiles.find_request, which Gluon cannot call."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_seqlens_q_ptr + middle) // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def item(
    turn, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests, first_block, blocks, heads,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The block of round `turn`: long blocks first, dealt out in serpentine order.

    Returns: head and block within the chunk, request, first token, rows (none: at most 0), position
    of row 0, end of the keys.
    """
    programs = gl.num_programs(0)
    index = turn * programs + gl.program_id(0)
    if turn % 2 == 1:
        index = turn * programs + programs - 1 - gl.program_id(0)
    chunk_head = index % heads
    chunk_block = blocks - 1 - index // heads
    block = first_block + gl.maximum(chunk_block, 0)
    request = _find_request(block, cu_seqlens_q_ptr, num_requests, BLOCK_M)
    first_token = gl.load(cu_seqlens_q_ptr + request)
    q_len = gl.load(cu_seqlens_q_ptr + request + 1) - first_token
    m0 = (block - first_token // BLOCK_M - request) * BLOCK_M
    rows = gl.where(chunk_block >= 0, q_len - m0, 0)
    t0 = gl.load(q_start_ptr + request) + m0
    end_key = gl.minimum(gl.load(kv_len_ptr + request), t0 + BLOCK_M)
    return chunk_head, chunk_block, request, first_token + m0, rows, t0, end_key
