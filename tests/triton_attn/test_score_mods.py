"""Score modifications other than the relative bias, one of them written the way a user would."""

import pytest
import torch
import triton
import triton.language as tl

from tests.triton_attn.problems import make_problem, run, within_budget
from triton_attn import ScoreMod, alibi, softcap


@triton.jit
def _block_sparse(score, q_pos, k_pos, q_token, head, aux):
    """Hide keys whose 16-key block the query's segment may not see: aux[0] [T, blocks] int32
    flags."""
    blocks: tl.constexpr = 16
    flag = tl.load(aux[0] + q_token * blocks + k_pos // 16, mask=k_pos // 16 < blocks, other=0)
    return tl.where(flag != 0, score, float("-inf"))


def _block_sparse_reference(score, q_pos, k_pos, q_token, aux):
    visible = aux[0][q_token][:, k_pos // 16] != 0
    return score.masked_fill(~visible, float("-inf"))


@triton.jit
def _near_bonus(score, q_pos, k_pos, q_token, head, aux):
    near = (q_pos - k_pos >= 0) & (q_pos - k_pos < 24)
    return score + tl.where(near, tl.load(aux[0] + head), 0.0)


def _near_bonus_reference(score, q_pos, k_pos, q_token, aux):
    distance = q_pos[:, None] - k_pos[None, :]
    return score + aux[0].to(score.dtype)[:, None, None] * ((distance >= 0) & (distance < 24))


def mods():
    flags = (torch.arange(16)[None, :] + torch.arange(36)[:, None]) % 3 > 0
    return {
        "none": None,
        "alibi": alibi(torch.tensor([0.25, 0.0625])),
        "softcap": softcap(torch.tensor([0.1])),
        "bounded extent": ScoreMod(
            fn=_near_bonus,
            reference=_near_bonus_reference,
            aux=(torch.tensor([1.0, -0.5]),),
            extent=24,
        ),
        "masking": ScoreMod(
            fn=_block_sparse, reference=_block_sparse_reference, aux=(flags.int(),), may_mask=True
        ),
    }


def on(mod, device):
    if mod is None:
        return None
    return ScoreMod(
        fn=mod.fn, reference=mod.reference, aux=tuple(x.to(device) for x in mod.aux),
        extent=mod.extent,
        may_mask=mod.may_mask,
    )  # fmt: skip


@pytest.mark.parametrize("name", mods())
def test_prefill_mods(gfx950, name):
    mod = mods()[name]
    problem = make_problem((35, 1), (100, 40))
    out = run(gfx950, problem, "prefill", mod=mod)
    assert torch.isfinite(out).all()
    assert within_budget(problem, out, mod)


@pytest.mark.parametrize("name", ["softcap", "masking"])
def test_decode_mods(gfx950, name):
    mod = mods()[name]
    problem = make_problem((1, 1), (100, 40), seed=1)
    assert within_budget(problem, run(gfx950, problem, "decode", mod=mod), mod)


@pytest.mark.full
@pytest.mark.parametrize("name", mods())
@pytest.mark.parametrize("entry", ["prefill", "decode", "verify"])
def test_mods_everywhere(target, entry, name):
    mod = mods()[name]
    q_lens = {"prefill": (35, 1), "decode": (1, 1), "verify": (3, 2)}[entry]
    problem = make_problem(q_lens, (100, 40), window=48)
    out = run(target, problem, entry, mod=on(mod, target.device))
    assert within_budget(problem, out, mod)


def test_a_mod_that_is_not_applied_is_noticed(gfx950):
    problem = make_problem((35, 1), (100, 40))
    out = run(gfx950, problem, "prefill", mod=None)
    for name, mod in mods().items():
        if mod is not None:
            assert not within_budget(problem, out, mod), name
