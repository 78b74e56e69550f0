"""What the two expert layouts share on a tile: the gate/up product with SwiGLU, the down product.

Weights are [rows, depth] with unit stride along the depth, so both operands of a dot are read along
their contiguous axis. Dots of fp32 operands are exact ("ieee": the default would be TF32).
"""

import triton
import triton.language as tl


@triton.jit
def expert_weights(routed_ptr, shared_ptr, expert, shared, size):
    """Start of an expert's block of `size` elements: shared expert `shared` if that is >= 0, else
    routed `expert`.

    Chosen as an address: AMD's compiler follows every pointer to its one base, and with a pointer
    chosen between two it fails, or needs the product twice and twice the LDS.
    """
    element = routed_ptr.dtype.element_ty
    bytes_each: tl.constexpr = element.primitive_bitwidth // 8
    routed_at = routed_ptr.to(tl.int64) + expert.to(tl.int64) * size * bytes_each
    shared_at = shared_ptr.to(tl.int64) + shared.to(tl.int64) * size * bytes_each
    at = tl.where(shared >= 0, shared_at, routed_at)
    return tl.multiple_of(at.to(tl.pointer_type(element)), 16)


@triton.jit
def add_product(acc, a, b):
    """acc + a b. With fp32 operands the step is summed by itself first: one chain of fp32 additions
    over the whole depth would lose several times what a blocked sum loses."""
    if a.dtype == tl.float32:
        # Without the bound the compiler makes one chain of the product and the addition.
        return acc + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=a.shape[1])
    else:
        return tl.dot(a, b, acc)


@triton.jit
def gate_up_tile(
    x_ptr, rows, mask_m, w_ptr, n0, hidden, width, stride_x,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """silu(x g^T) * (x u^T), fp32 [BLOCK_M, BLOCK_N], for activation rows `rows` and columns n0 ..
    of one expert.

    rows: all readable; what comes out of those outside mask_m is never used, so they are masked
        only where that is free. w_ptr: the expert's [2 * width, hidden] block, gate rows then up
        rows.
    """
    offs_k = tl.arange(0, BLOCK_K)
    # Columns past the end repeat the last one and are never stored: cheaper than masking weights.
    offs_n = tl.minimum(n0 + tl.arange(0, BLOCK_N), width - 1)
    w_offs = offs_n[None, :] * hidden + offs_k[:, None]
    x_offs = rows[:, None] * stride_x + offs_k[None, :]
    up_ptr = w_ptr + width * hidden
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, hidden, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptr + k + x_offs, mask=mask_m[:, None], other=0.0)
            g = tl.load(w_ptr + k + w_offs)
            u = tl.load(up_ptr + k + w_offs)
        else:
            mask_k = offs_k < hidden - k
            x = tl.load(x_ptr + k + x_offs, mask=mask_k[None, :], other=0.0)
            g = tl.load(w_ptr + k + w_offs, mask=mask_k[:, None], other=0.0)
            u = tl.load(up_ptr + k + w_offs, mask=mask_k[:, None], other=0.0)
        gate = add_product(gate, x, g)
        up = add_product(up, x, u)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def down_step(
    acc, a_ptr, rows, mask_m, w_ptr, n0, k, hidden, width,
    EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + a w^T over the inner columns k .. k + BLOCK_K of one expert's [hidden, width] block."""
    offs_k = k + tl.arange(0, BLOCK_K)
    offs_n = tl.minimum(n0 + tl.arange(0, BLOCK_N), hidden - 1)
    a_ptrs = a_ptr + rows[:, None] * width + offs_k[None, :]
    w_ptrs = w_ptr + (offs_n[None, :] * width + offs_k[:, None])
    if EVEN_K:
        a = tl.load(a_ptrs, mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptrs)
    else:
        mask_k = offs_k < width
        a = tl.load(a_ptrs, mask=mask_k[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=mask_k[:, None], other=0.0)
    return add_product(acc, a, w)


@triton.jit
def grouped_pid(pid, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """(m, n) of a flat program id: GROUP_M row blocks walk the columns together, so that they share
    weights in L2."""
    per_group = GROUP_M * blocks_n
    first = (pid // per_group) * GROUP_M
    size = tl.minimum(blocks_m - first, GROUP_M)
    return first + (pid % per_group) % size, (pid % per_group) // size
