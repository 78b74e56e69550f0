"""Register layouts of matrix instructions and transposing LDS reads, in their published form.

A second implementation, independent of gcn_emulator: one element at a time, nothing shared with
the code under test. Sources: "AMD Instinct MI300 Instruction Set Architecture", section 7.1
(matrix fused multiply-add, element layouts in terms of K_L, H, B_I, M_I and G); "AMD Instinct
CDNA4 Instruction Set Architecture", the f8f6f4 matrix instructions and DS_READ_B64_TR_B{16,8,4}.

The closed form for an M x N x K instruction with B blocks:

    K_L = K / (64 / (M B))                       elements of one row a lane holds
    A[i][k] of block b:  item = k mod K_L,       lane = i + M (b + B floor(k / K_L))
    B[k][j] of block b:  the same with j for i and N for M
    H = 4 (1 for f64),  B_I = ceil(64 / (N M / H)),  M_I = (64 / B_I) / N,  G = M / (H M_I)
    D[i][j] of block b:  item = i mod H + H (floor(i / (H M_I)) mod G + G floor(b / B_I))
                         lane = j + N (floor(i / H) mod M_I + M_I (b mod B_I))

An f8f6f4 instruction consumes 128 bits of every lane at a time, so its K is cut into passes: 8-bit
operands need two passes of K / 2 (K_L = 16 in each), 4-bit operands one (K_L = 32).
"""

from math import ceil


def source_place(
    i: int, k: int, b: int, *, m: int, depth: int, blocks: int, pass_items: int | None
):
    """(lane, item) of element (row i, k) of an A operand, or (column i, k) of a B operand."""
    if pass_items is None:
        k_l = depth // (64 // (m * blocks))
        return i + m * (b + blocks * (k // k_l)), k % k_l
    groups = 64 // m
    pass_depth = pass_items * groups  # k values one pass consumes
    which, inside = divmod(k, pass_depth)
    return i + m * (inside // pass_items), which * pass_items + inside % pass_items


def result_place(i: int, j: int, b: int, *, m: int, n: int, h: int = 4):
    """(lane, item) of element (i, j) of the result."""
    b_i = ceil(64 / (n * m / h))
    m_i = (64 // b_i) // n
    g = m // (h * m_i)
    item = i % h + h * ((i // (h * m_i)) % g + g * (b // b_i))
    return j + n * ((i // h) % m_i + m_i * (b % b_i)), item


def transposed_source(lane: int, item: int, bits: int):
    """(lane, item) of a plain read that DS_READ_B64_TR_B{bits} gives `lane` as element `item`.

    The 16 lanes of a group read, 64 bits each, a matrix whose rows are 16 elements long: a row
    spans 16 * bits / 64 lanes. Lane c of the group receives column c, row by row.
    """
    group, column = lane & ~15, lane & 15
    per_lane = 64 // bits
    lanes_per_row = 16 // per_lane
    return group + item * lanes_per_row + column // per_lane, column % per_lane
