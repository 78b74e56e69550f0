"""Attention with a score_mod compiled in; also a register entry for the tests of `verify`.

Three mods of different kinds: arithmetic on positions (ALiBi), a transcendental on the score
(softcap), and a load per score (a bias gathered by distance).
"""

import torch
import triton
import triton.language as tl

from kernel_base.register import Case, KernelEntry, Outcome
from kernel_base.tuning import TuningRow, TuningTable

HEAD_DIM = 64


@triton.jit
def alibi(score, h, position_q, position_k, aux_ptr, EXTENT: tl.constexpr):
    return score - tl.exp2(-(h + 1).to(tl.float32)) * (position_q - position_k).to(tl.float32)


@triton.jit
def softcap(score, h, position_q, position_k, aux_ptr, EXTENT: tl.constexpr):
    e = tl.exp2(score * (2 * 1.4426950408889634 / 3.0))  # 3 tanh(score / 3)
    return 3.0 * (1.0 - 2.0 / (e + 1.0))


@triton.jit
def gather(score, h, position_q, position_k, aux_ptr, EXTENT: tl.constexpr):
    distance = position_q - position_k
    inside = (distance >= 0) & (distance < EXTENT)
    return score + tl.load(aux_ptr + h * EXTENT + distance, mask=inside, other=0.0).to(tl.float32)


MODS = {"alibi": alibi, "softcap": softcap, "gather": gather}


@triton.jit
def score_mod_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    aux_ptr,
    tokens,
    softmax_scale,
    SCORE_MOD: tl.constexpr,
    HEADS: tl.constexpr,
    EXTENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    start_m, h = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at = h * HEAD_DIM + tl.arange(0, HEAD_DIM)
    stride = HEADS * HEAD_DIM
    mask_m = offs_m[:, None] < tokens
    q = tl.load(q_ptr + offs_m[:, None] * stride + at[None, :], mask=mask_m, other=0.0)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    for start_n in range(0, tl.minimum(start_m + BLOCK_M, tokens), BLOCK_N):
        n = start_n + offs_n
        k = tl.load(k_ptr + n[None, :] * stride + at[:, None], mask=n[None, :] < tokens, other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * softmax_scale
        s = SCORE_MOD(s, h, offs_m[:, None], n[None, :], aux_ptr, EXTENT)
        s = tl.where((offs_m[:, None] >= n[None, :]) & (n[None, :] < tokens), s, -1e30)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + n[:, None] * stride + at[None, :], mask=n[:, None] < tokens, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m[:, None] * stride + at[None, :], out, mask=mask_m)


def score_mod_attention(q_ThD, k_ThD, v_ThD, aux_hE, mod, row):
    """Causal attention with `mod` applied to the scaled scores; launched as `row` says."""
    tokens, heads, head_dim = q_ThD.shape
    out = torch.full_like(q_ThD, float("nan"))
    score_mod_kernel[(triton.cdiv(tokens, row.constexprs["BLOCK_M"]), heads)](
        q_ThD,
        k_ThD,
        v_ThD,
        out,
        aux_hE,
        tokens,
        head_dim**-0.5,
        SCORE_MOD=MODS[mod],
        HEADS=heads,
        EXTENT=aux_hE.shape[1],
        HEAD_DIM=head_dim,
        **row.launch_kwargs(),
    )
    return out


def reference(q_ThD, k_ThD, v_ThD, aux_hE, mod, dtype):
    """The same with plain torch, scores and softmax in `dtype`."""
    tokens, heads, head_dim = q_ThD.shape
    position = torch.arange(tokens)
    distance = position[:, None] - position[None, :]
    out = torch.empty(q_ThD.shape, dtype=dtype)
    for h in range(heads):
        s = q_ThD[:, h].to(dtype) @ k_ThD[:, h].to(dtype).T * head_dim**-0.5
        if mod == "alibi":
            s = s - 2.0 ** -(h + 1) * distance
        elif mod == "softcap":
            s = 3 * torch.tanh(s / 3)
        else:
            bias = aux_hE[h].to(dtype)[distance.clamp(0, aux_hE.shape[1] - 1)]
            s = s + bias.masked_fill((distance < 0) | (distance >= aux_hE.shape[1]), 0.0)
        out[:, h] = s.masked_fill(distance < 0, float("-inf")).softmax(-1).to(dtype) @ v_ThD[
            :, h
        ].to(dtype)
    return out


def inputs(tokens, heads=2, dtype=torch.bfloat16, extent=24):
    """q, k, v [tokens, heads, HEAD_DIM] and a bias table [heads, extent]."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(dtype) for _ in range(3)
    )
    return q, k, v, torch.randn(heads, extent, generator=generator).to(dtype)


def _case(mod, tokens, dtype, row):
    def run(device):
        tensors = inputs(tokens, dtype=dtype)
        out = score_mod_attention(*tensors, mod, row)
        return [
            Outcome(
                name="out",
                out=out,
                reference=reference(*tensors, mod, torch.float64),
                eager=reference(*tensors, mod, dtype),
            )
        ]

    return Case(name=f"{mod}, {tokens} tokens, {str(dtype).removeprefix('torch.')}", run=run)


def _cases(arch, row):
    for mod in MODS:
        yield _case(mod, 70, torch.bfloat16, row)
    yield _case("alibi", 1, torch.float32, row)
    yield _case("gather", 33, torch.float32, row)


def row_for(arch, **options):
    """A tuning row of the test kernel."""
    return TuningRow(
        arch=arch,
        constexprs={"BLOCK_M": 32, "BLOCK_N": 32},
        options={"num_warps": 2, "matrix_instr_nonkdim": 16, **options},
        evidence="guess",
        source="a test",
    )


ENTRY = KernelEntry(
    name="tests.score_mod_attention",
    kernels=("score_mods:score_mod_kernel",),
    table=TuningTable("score_mod_attention", (row_for("gfx942"), row_for("gfx950"))),
    cases=_cases,
)
