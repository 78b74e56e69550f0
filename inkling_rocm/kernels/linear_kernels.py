"""The kernels of linear.py: y = x W^T of few tokens in one launch, every weight read once.

One token: a program owns BLOCK_N rows of W over the whole depth and multiplies them with the token
elementwise, added up at the end; there are as many loads in flight as a program has registers for.

A few: the same with matrix instructions, the depth in PARTS that warps of one program sum side by
side. Nothing is exchanged between programs, but each reads all of x.

More: tiles of BLOCK_N columns and BLOCK_M tokens. With W_FIRST the columns are the rows of the
matrix instruction: Hopper's has 64, which tokens may be fewer than. Where the columns are too few
to fill the GPU the depth is split in slices, whose fp32 sums are added in their order, where
libraries need a second launch: by the program of a tile that ends last, or (TAIL) by programs
behind all others in the grid, TAIL tokens each, that wait for their tile. Who ends last does not
show.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_base.device import arrive, await_arrivals


@triton.jit
def _linear_vector_kernel(
    out_ptr, x_ptr, w_ptr, columns, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Columns past the end repeat the last one and are never stored: cheaper than masking weights.
    rows = w_ptr + tl.minimum(n, columns - 1)[:, None].to(tl.int64) * DEPTH
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        if start + BLOCK_K <= DEPTH:
            x = tl.load(x_ptr + start + k)
            w = tl.load(rows + (start + k)[None, :])
        else:
            mask = start + k < DEPTH
            x = tl.load(x_ptr + start + k, mask=mask, other=0.0)
            w = tl.load(rows + (start + k)[None, :], mask=mask[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < columns)


@triton.jit(do_not_specialize=("tokens",))
def _linear_parts_kernel(
    out_ptr, x_ptr, w_ptr, tokens, columns, depth, stride_x, stride_out,
    EVEN_K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.cdiv(depth, PARTS * BLOCK_K) * BLOCK_K  # depth of one
    k = (tl.arange(0, PARTS) * part)[:, None, None] + tl.arange(0, BLOCK_K)[None, None, :]
    mask_t = (t < tokens)[None, :, None]
    x_ptrs = x_ptr + t[None, :, None].to(tl.int64) * stride_x + k
    rows = tl.minimum(n, columns - 1)[None, :, None].to(tl.int64)
    w_ptrs = w_ptr + rows * depth + k
    acc = tl.zeros([PARTS, BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, part, BLOCK_K):
        if EVEN_K:
            w = tl.load(w_ptrs + start)
            x = tl.load(x_ptrs + start, mask=mask_t, other=0.0)
        else:
            mask_k = k < depth - start
            w = tl.load(w_ptrs + start, mask=mask_k, other=0.0)
            x = tl.load(x_ptrs + start, mask=mask_t & mask_k, other=0.0)
        acc = tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    y = tl.sum(acc, 0)
    out_ptrs = out_ptr + t[None, :].to(tl.int64) * stride_out + n[:, None]
    mask = (t < tokens)[None, :] & (n < columns)[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_slices(partial_ptr, t, n, tokens, columns, SLICES: tl.constexpr):
    """The slices' sums of tokens t and columns n, as a tuple. Programs of other compute units wrote
    them: read past this one's L1."""
    at, mask = t[:, None] * columns + n[None, :], (t < tokens)[:, None] & (n < columns)[None, :]
    sums = ()
    for _ in tl.static_range(SLICES):
        value = tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        sums = sums + (value,)  # type: ignore[assignment]  # noqa: RUF005
        partial_ptr += tokens * columns
    return sums


@triton.jit
def _store_sum(out_ptr, sums, t, n, tokens, columns, stride_out, SLICES: tl.constexpr):
    y = sums[0]
    for slice in tl.static_range(1, SLICES):
        y += sums[slice]
    out_ptrs = out_ptr + t[:, None].to(tl.int64) * stride_out + n[None, :]
    mask = (t < tokens)[:, None] & (n < columns)[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_tile_part(
    out_ptr, partial_ptr, tickets_ptr, number, tiles_n, tokens, columns, stride_out,
    SLICES: tl.constexpr, AMD: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program `number` of those behind the products: TAIL tokens of a tile."""
    PARTS: tl.constexpr = BLOCK_M // TAIL
    tile, part = number // PARTS, number % PARTS
    t = tile // tiles_n * BLOCK_M + part * TAIL + tl.arange(0, TAIL)
    n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    await_arrivals(tickets_ptr + tile, SLICES)
    sums = _load_slices(partial_ptr, t, n, tokens, columns, SLICES)
    # Counted too, while those loads are on their way: the last one through leaves the ticket as it
    # was found.
    if arrive(tickets_ptr + tile, t, AMD) == SLICES + PARTS - 1:
        tl.store(tickets_ptr + tile, 0)
    _store_sum(out_ptr, sums, t, n, tokens, columns, stride_out, SLICES)


@triton.jit(do_not_specialize=("tokens",))
def _linear_tiles_kernel(
    out_ptr, partial_ptr, tickets_ptr, x_ptr, w_ptr, tokens, columns, depth, stride_x, stride_out,
    SLICES: tl.constexpr, EVEN_K: tl.constexpr, AMD: tl.constexpr, TAIL: tl.constexpr,
    W_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M) * tiles_n
    program = tl.program_id(0)
    if program < tiles * SLICES:
        tile, slice = program % tiles, program // tiles
        t = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        first = slice * SLICE
        mask_t = (t < tokens)[:, None]
        x_ptrs = x_ptr + first + t[:, None].to(tl.int64) * stride_x + k[None, :]
        # Columns past the end repeat the last one and are never stored.
        rows = tl.minimum(n, columns - 1).to(tl.int64) * depth
        if W_FIRST:
            w_ptrs = w_ptr + first + rows[:, None] + k[None, :]
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            w_ptrs = w_ptr + first + rows[None, :] + k[:, None]
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, tl.minimum(SLICE, depth - first), BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + start, mask=mask_t, other=0.0)
                w = tl.load(w_ptrs + start)
            else:
                mask_k = k < depth - first - start
                mask_w = mask_k[None, :] if W_FIRST else mask_k[:, None]
                x = tl.load(x_ptrs + start, mask=mask_t & mask_k[None, :], other=0.0)
                w = tl.load(w_ptrs + start, mask=mask_w, other=0.0)
            if W_FIRST:
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, w, acc, input_precision="ieee")
        y = tl.trans(acc) if W_FIRST else acc
        mask = (t < tokens)[:, None] & (n < columns)[None, :]
        if SLICES == 1:
            out_ptrs = out_ptr + t[:, None].to(tl.int64) * stride_out + n[None, :]
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            at = t[:, None] * columns + n[None, :]
            tl.store(partial_ptr + slice * tokens * columns + at, y, mask=mask)
            arrived = arrive(tickets_ptr + tile, t, AMD)
            if TAIL == 0:  # noqa: SIM102 - known to the compiler, unlike the next
                if arrived == SLICES - 1:
                    tl.debug_barrier()
                    tl.store(tickets_ptr + tile, 0)
                    sums = _load_slices(partial_ptr, t, n, tokens, columns, SLICES)
                    _store_sum(out_ptr, sums, t, n, tokens, columns, stride_out, SLICES)
    elif TAIL > 0:
        _add_tile_part(
            out_ptr, partial_ptr, tickets_ptr, program - tiles * SLICES, tiles_n, tokens, columns,
            stride_out, SLICES, AMD, TAIL, BLOCK_M, BLOCK_N,
        )  # fmt: skip
