"""Which tiles a program of hopper.py has, and what their rows are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_aiter.routing import ROW_ALIGN


@gluon.jit
def find_walk(tiles, MIX: gl.constexpr):
    """(first tile, distance to the next, number) of this program's tiles. With MIX half of the
    programs take theirs in reverse: tiles with many rows are bound by arithmetic and those with few
    by the weights' bytes, and so both kinds run at any time."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    rounds = gl.cdiv(tiles - program, programs)
    first = program
    step = programs
    if MIX:
        back = program >= programs // 2
        first = gl.where(back, program + (rounds - 1) * programs, first)
        step = gl.where(back, -programs, step)
    return first, step, rounds


@gluon.jit
def read_entry(block, order, blocks):
    """(expert, first row, end) as listed for a row block: loads alone, so that a round can ask for
    the next one's without waiting."""
    block_expert_ptr, block_begin_ptr, block_end_ptr = order
    at = gl.maximum(gl.minimum(block, blocks - 1), 0)
    expert = gl.load(block_expert_ptr + at)
    return expert, gl.load(block_begin_ptr + at), gl.load(block_end_ptr + at)


@gluon.jit
def count_shared_rows(tokens):
    """Rows from one shared expert's first to the next one's."""
    return gl.cdiv(tokens, ROW_ALIGN) * ROW_ALIGN


@gluon.jit
def find_tile(block, entry, tokens, choices, blocks, FOLD: gl.constexpr, BLOCK_M: gl.constexpr):
    """(expert, shared expert or -1, first row, rows) of a row block. The blocks of shared experts
    come behind the listed ones, as in grouped.py; their expert is the shared one's number."""
    expert, row0, end = entry
    shared = -1
    if FOLD:
        per_shared = gl.cdiv(tokens, BLOCK_M)
        behind = gl.maximum(block - blocks, 0)
        is_shared = block >= blocks
        shared = gl.where(is_shared, behind // per_shared, -1)
        first_row = choices + shared * count_shared_rows(tokens)
        row0 = gl.where(is_shared, first_row + behind % per_shared * BLOCK_M, row0)
        end = gl.where(is_shared, first_row + tokens, end)
        expert = gl.where(is_shared, shared, expert)
    return expert, shared, row0, gl.minimum(end - row0, BLOCK_M)


@gluon.jit
def count_parts(shared, shared_experts, UP: gl.constexpr, FOLD: gl.constexpr):
    """Depths that make a tile: the down products of all shared experts are one sum."""
    parts = 1
    if FOLD and not UP:
        parts = gl.where(shared >= 0, shared_experts, 1)
    return parts


@gluon.jit
def read_listed(choice_ptr, row0, rows, offs_m, choices):
    """Rows row0 + offs_m and what the sort lists there; rows past the end repeat a valid one."""
    row = row0 + gl.minimum(offs_m, rows - 1)
    return row, gl.load(choice_ptr + gl.minimum(row, choices - 1))


@gluon.jit
def tokens_of(listed, row, shared, tokens, choices, TOP_K: gl.constexpr, FOLD: gl.constexpr):
    """Token and weight column of listed rows."""
    token = listed // TOP_K
    column = listed % TOP_K
    if FOLD:
        behind = row - choices - shared * count_shared_rows(tokens)
        token = gl.where(shared >= 0, behind, token)
        column = gl.where(shared >= 0, TOP_K + shared, column)
    return token, column


@gluon.jit
def find_x_rows(
    choice_ptr, row0, rows, shared, offs_m, tokens, choices, stride_x,
    TOP_K: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """Offsets of the tokens' rows of x: 32 bits, the launcher takes no x of 2^31 elements."""
    row, listed = read_listed(choice_ptr, row0, rows, offs_m, choices)
    token, _ = tokens_of(listed, row, shared, tokens, choices, TOP_K, FOLD)
    return token * stride_x
