"""The same tiny models on the CPU reference and on the emulated AMD targets, op by op."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inkling_rocm.parity.compare import Comparison, Site, compare, error_of
from inkling_rocm.parity.problems import PROBLEMS
from inkling_rocm.parity.recording import Recording, differences, file_name, load, save
from inkling_rocm.parity.report import difference_line, parity, summary
from inkling_rocm.parity.routing import scores_of, shortfall, weights_of
from inkling_rocm.parity.run import Target, choose_ops
from inkling_rocm.parity.watch import watched

CPU = Target.named("cpu")
RECORDED = Path(__file__).parent.parent / "data" / "parity" / "h200"


def check(found: Comparison) -> None:
    """Within the budgets beside float64, and beside what a real H200 gave."""
    assert found.passed, "\n".join(summary(found))
    assert len({site.site for site in found.sites}) >= 18  # nothing was left out
    recording = of_h200(found.problem, found.dtype)
    assert [d for d in differences(found, recording.kept) if not d.ok] == []
    if found.dtype == "float32":
        assert found.tokens == recording.tokens


def of_h200(problem: str, dtype: str) -> Recording:
    """Recorded with `inkling-rocm parity --target cuda --record`."""
    recording = load(RECORDED / file_name(problem, dtype), PROBLEMS[problem])
    assert "H200" in recording.device
    assert recording.commit
    return recording


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_is_within_its_own_budget(name, dtype):
    check(compare(PROBLEMS[name], CPU, dtype))


@pytest.mark.parametrize("name", PROBLEMS)
def test_emulated_fp32(name):
    """Every op in its Triton variant on gfx942; the engine's tokens are the CPU's."""
    pytest.importorskip("triton")
    found = compare(PROBLEMS[name], Target.named("gfx942"), torch.float32)
    check(found)
    assert found.tokens_equal
    chosen = choose_ops(PROBLEMS[name], Target.named("gfx942"), torch.float32).choices
    assert {c.variant for c in chosen} == {"triton"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("gfx942", torch.bfloat16), ("gfx950", torch.float32), ("gfx950", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_emulated(name, arch, dtype):
    pytest.importorskip("triton")
    check(compare(PROBLEMS[name], Target.named(arch), dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_on_a_gpu(name, dtype):
    check(compare(PROBLEMS[name], Target.named("cuda"), dtype))


def _scaled(result, args, kwargs):
    return result * 1.001


def _weights_swapped(result, args, kwargs):
    return result[0], result[1].flip(-1)


def _worst_expert(result, args, kwargs):
    ids = result[0].clone()
    ids[0, 0] = scores_of(args, kwargs)[0].argmin()
    return ids, weights_of(ids, args, kwargs)


def _ring_row_lost(result, args, kwargs):
    kwargs["ring"].state[1:, 0] = 0
    return result


def _value_lost(result, args, kwargs):
    kv = kwargs["kv"]
    kv.v.flatten(0, 1)[kv.slot[0]] = 0
    return result


def _nan(result, args, kwargs):
    return result * float("nan")


@pytest.mark.parametrize(
    ("site", "fault"),
    [
        ("1.attn.rel_attention", _scaled),
        ("0.attn.o_proj", _scaled),
        ("1.mlp.gate", _weights_swapped),
        ("1.mlp.gate", _worst_expert),
        ("1.mlp.experts", _nan),
        ("0.mlp.residual_conv_norm", _ring_row_lost),
        ("1.attn.attention_prologue", _value_lost),
        ("head.lm_head", _scaled),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_planted_fault_is_located(site, fault):
    """One op of one layer is wrong; the report names it, and only it on its own inputs."""
    problem = PROBLEMS["dense-moe"]

    def plant(at, op, function, args, kwargs):
        result = function(*args, **kwargs)
        return fault(result, args, kwargs) if at == site else result

    ops = watched(choose_ops(problem, CPU, torch.float32), plant)
    found = compare(problem, CPU, torch.float32, ops=ops)
    assert not found.passed
    assert found.first_fault().site == site
    if fault is not _nan:  # a NaN makes everything after it NaN, on equal inputs too
        assert {s.site for s in found.sites if not s.same_ok} == {site}
    assert any(f"first fault: {site}" in line for line in summary(found))
    apart = differences(found, of_h200("dense-moe", "float32").kept)
    assert f"EXCEEDED, first at {site} " in difference_line(apart, False, "an H200")


@pytest.mark.parametrize("name", ["gfx942", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_planted_fault_is_located_among_triton_ops(name):
    pytest.importorskip("triton")
    problem, target = replace(PROBLEMS["dense-moe"], decode_steps=0), Target.named(name)
    site = "1.mlp.experts"

    def plant(at, op, function, args, kwargs):
        result = function(*args, **kwargs)
        return result * 1.001 if at == site else result

    ops = watched(choose_ops(problem, target, torch.float32), plant)
    found = compare(problem, target, torch.float32, ops=ops)
    assert found.first_fault().site == site
    recorded = of_h200("dense-moe", "float32").kept
    kept = {key: t for key, t in recorded.items() if key in found.kept}  # no decode forwards here
    assert f"EXCEEDED, first at {site} " in difference_line(differences(found, kept), False, "")


def test_experts_chosen_within_rounding_are_followed():
    """Two experts of equal scores: the recording took the other; what follows is left out. Of
    different scores: a fault."""
    problem = PROBLEMS["dense-moe"]
    found = compare(problem, CPU, torch.float32)
    forward, site = next(key for key in found.scores)
    recorded = {key: t.clone() for key, t in found.kept.items()}
    ids = recorded[forward, site, "0"]
    ids[0] = ids[0].flip(-1)
    later = [k for k in recorded if k[0] > forward or (k[0] == forward and k[1] == "1.mlp.experts")]
    recorded[later[0]] *= 2
    apart = differences(found, recorded)
    assert [d.site for d in apart if not d.ok] == [site]
    scores = found.scores[forward, site] = found.scores[forward, site].clone()
    scores[0, ids[0].long()] = scores[0].max()
    apart = differences(found, recorded)
    assert all(d.ok for d in apart)
    assert 0 < len([d for d in apart if not d.compared]) < len(apart)
    assert "come after experts chosen within rounding" in difference_line(apart, True, "")


def test_recordings_round_trip_and_are_of_their_weights(tmp_path):
    problem = PROBLEMS["grouped"]
    found = compare(problem, CPU, torch.float32)
    save(found, problem, tmp_path, device="here", commit="abc", versions={"torch": "x"})
    path = tmp_path / file_name("grouped", "float32")
    recording = load(path, problem)
    assert recording.tokens == found.tokens
    assert (recording.device, recording.commit) == ("here", "abc")
    assert max(d.error for d in differences(found, recording.kept)) == 0.0
    with pytest.raises(ValueError, match="other weights"):
        load(path, replace(problem, seed=problem.seed + 1))
    recording.kept.popitem()
    with pytest.raises(ValueError, match="other ops"):
        differences(found, recording.kept)


def test_a_difference_beyond_the_budget_is_a_failure(tmp_path):
    problem = PROBLEMS["grouped"]
    found = compare(problem, CPU, torch.float32)
    key = next(k for k in found.kept if k[1] == "1.attn.o_proj")
    found.kept[key] = found.kept[key] * 1.001
    save(found, problem, tmp_path, device="elsewhere", commit="", versions={})
    lines: list[str] = []
    results, failures = parity(
        ["cpu"], ["grouped"], ["float32"], against=tmp_path, say=lines.append
    )
    assert failures == 1
    assert results[0]["beside"]["device"] == "elsewhere"
    assert any("1.attn.o_proj" in line and "EXCEEDED" in line for line in lines)


def test_what_a_choice_gives_away():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1]])
    assert shortfall(scores, torch.tensor([[1, 2], [0, 1]])) == 0
    assert shortfall(scores, torch.tensor([[1, 0], [0, 1]])) == pytest.approx(0.4)
    for ids in ([1, 1], [2, 2]):
        assert math.isnan(shortfall(scores, torch.tensor([ids, [0, 1]])))
    tied = torch.tensor([[0.9, 0.9, 0.5]])
    assert shortfall(tied, torch.tensor([[1, 0]])) == 0
    assert math.isnan(shortfall(tied, torch.tensor([[1, 1]])))
    assert shortfall(scores, torch.tensor([[1, 3], [0, 1]])) != 0
    assert shortfall(scores, torch.tensor([[1, 2]])) != 0


def test_errors():
    assert error_of(torch.tensor([1.0]), torch.tensor([float("nan")])) != 0
    assert not Site(
        forward=0, site="x", output="0", own=float("nan"), own_budget=1.0, same=0.0, same_budget=1.0
    ).own_ok
    assert error_of(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    with pytest.raises(ValueError, match="unknown parity problem"):
        parity(["cpu"], ["none"])
    with pytest.raises(ValueError, match="choose from cpu"):
        parity(["gfx90a"])
