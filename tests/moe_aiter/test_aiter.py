"""The aiter contract: our calls bound to real signatures, and a fake that notices faults."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import zipfile

import pytest
import torch

from kernel_base.arch import ARCHS
from moe_aiter.aiter_backend import selftest, untuned
from moe_aiter.aiter_backend.calls import AiterExperts, AiterGate
from moe_aiter.aiter_backend.features import COMMON_PARAMETERS, describe, find_aiter
from moe_aiter.aiter_backend.layout import shuffle, unshuffle
from moe_aiter.aiter_backend.refusals import refuse_experts, refuse_gate
from moe_aiter.problems import Problem, make_gate_problem, make_problem
from moe_aiter.reference import experts_reference, gate_reference
from tests.moe_aiter.fake_aiter import SIGNATURES, Violation, fake, recorded, signature, unpack

VERSIONS = tuple(SIGNATURES)


def problem(tokens=5, **shape) -> Problem:
    return make_problem(tokens, experts=6, top_k=3, hidden=128, width=128, **shape)


def prepare(p: Problem, version="2026-07", **arguments) -> AiterExperts:
    return AiterExperts.prepare(fake(version), **p.weights, **arguments)


def relative_error(p: Problem, out, **reference) -> float:
    want = p.reference(**reference)
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (3, 32, 64)])
def test_shuffle_follows_the_formula_and_back(shape):
    w = torch.randn(shape).bfloat16()
    assert torch.equal(unpack(shuffle(w)), w)
    assert torch.equal(unshuffle(shuffle(w)), w)
    assert shuffle(w).is_shuffled
    assert not torch.equal(shuffle(w), w)


@pytest.mark.parametrize(
    "w", [torch.zeros(8, 32).half(), torch.zeros(16, 40).half(), torch.zeros(16, 32)]
)
def test_weights_without_a_shuffled_form_are_refused(w):
    with pytest.raises(ValueError, match="aiter layout"):
        shuffle(w)


@pytest.mark.parametrize("version", VERSIONS)
def test_experts_bind_to_the_recorded_signature(version):
    p = problem()
    arguments = prepare(p, version).arguments(p.x, p.ids, p.gamma)
    signature(version, "fused_moe").bind(**arguments)
    assert set(arguments) <= set(COMMON_PARAMETERS)


@pytest.mark.parametrize("version", VERSIONS)
def test_common_parameters_are_in_every_recorded_signature(version):
    assert set(COMMON_PARAMETERS) <= set(signature(version, "fused_moe").parameters)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_experts_through_the_fake(version, tokens):
    p = problem(tokens)
    out = prepare(p, version)(p.x, p.ids, p.gamma)
    assert out.shape == p.x.shape
    if tokens:
        assert relative_error(p, out) < 0.015


@pytest.mark.parametrize("first", [0, 3])
def test_expert_parallel_mask(first):
    whole = problem(7)
    local = {name: whole.weights[name][first : first + 3] for name in ("w13", "w2")}
    part = Problem(x=whole.x, ids=whole.ids, gamma=whole.gamma, weights=whole.weights | local)
    experts = prepare(part, first_expert=first, global_experts=6)
    assert relative_error(part, experts(part.x, part.ids, part.gamma), first_expert=first) < 0.015
    with pytest.raises(ValueError, match="local range"):
        prepare(part, first_expert=4, global_experts=6)


def _call(p, **changes):
    experts = prepare(p)
    return experts.aiter.fused_moe(**(experts.arguments(p.x, p.ids, p.gamma) | changes))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("an unshuffled weight with the mark", lambda p, a: {"w1": _marked(unshuffle(a["w1"]))}),
        ("up rows before gate rows", lambda p, a: {"w1": shuffle(unshuffle(a["w1"]).roll(128, 1))}),
        ("weights of the next choice", lambda p, a: {"topk_weight": a["topk_weight"].roll(1, 1)}),
        (
            "weights applied to neither stage",
            lambda p, a: {"topk_weight": a["topk_weight"] * 0 + 1},
        ),
    ],
)
def test_a_wrong_layout_shows_in_the_result(name, change):
    p = problem()
    arguments = prepare(p).arguments(p.x, p.ids, p.gamma)
    assert relative_error(p, _call(p, **change(p, arguments))) > 0.1, name


def _marked(w):
    w.is_shuffled = True
    return w


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("M = 0", lambda a: {k: a[k][:0] for k in ("hidden_states", "topk_ids", "topk_weight")}),
        ("topk_ids dtype", lambda a: {"topk_ids": a["topk_ids"].long()}),
        ("topk_weight dtype", lambda a: {"topk_weight": a["topk_weight"].bfloat16()}),
        ("topk_weight contiguous", lambda a: {"topk_weight": a["topk_weight"].T.contiguous().T}),
        ("dtypes of x", lambda a: {"hidden_states": a["hidden_states"].float()}),
        ("shuffle marks", lambda a: {"w1": a["w1"].clone()}),
        ("ids in range", lambda a: {"topk_ids": a["topk_ids"] + 1}),
        ("activation", lambda a: {"activation": None}),
        ("quant type", lambda a: {"quant_type": None}),
        ("last slot", lambda a: {"expert_mask": torch.ones(8, dtype=torch.int32)}),
        ("counts the local", lambda a: {"expert_mask": torch.zeros(9, dtype=torch.int32)}),
    ],
)
def test_a_broken_precondition_is_noticed(message, change):
    p = problem()
    with pytest.raises(Violation, match=message):
        _call(p, **change(prepare(p).arguments(p.x, p.ids, p.gamma)))


@pytest.mark.parametrize("name", ["topk_weights", "w13", "expert_map"])
def test_an_argument_name_aiter_does_not_have_fails(name):
    with pytest.raises(TypeError):
        _call(problem(), **{name: None})


def test_wrong_arguments_of_ours_are_named():
    p = problem()
    experts = prepare(p)
    with pytest.raises(ValueError, match="int32"):
        experts(p.x, p.ids.long(), p.gamma)
    with pytest.raises(ValueError, match="topk_weights"):
        experts(p.x, p.ids, p.gamma[:, :3])
    with pytest.raises(ValueError, match="bfloat16"):
        experts(p.x.float(), p.ids, p.gamma)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_gate_through_the_fake(tokens):
    p = make_gate_problem(tokens, experts=20, hidden=64)
    arguments = (p.weight, p.bias, p.global_scale)
    ids, weights = AiterGate.prepare(fake(gate=True), *arguments, top_k=4, route_scale=2.5)(p.x)
    want_ids, want = gate_reference(p.x, *arguments, top_k=4, route_scale=2.5)
    assert torch.equal(ids, want_ids)
    assert ids.is_contiguous()
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-6)


def test_gate_exemption_underflowing_logits_are_nan():
    p = make_gate_problem(2, experts=8, hidden=64)
    gate = AiterGate.prepare(
        fake(gate=True), p.weight * 0 - 300, p.bias, p.global_scale, top_k=2, route_scale=1.0
    )
    assert gate(p.x.abs())[1].isnan().all()


REFUSALS = [
    ({"arch": "sm90"}, "AMD GPU"),
    ({"hip": False}, "ROCm build"),
    ({"aiter": "aiter is not installed"}, "not installed"),
    ({"dtype": "float16"}, "bf16"),
    ({"width": 192}, "192"),
    ({"hidden": 1000}, "1000"),
    ({"width": 768}, "2\\^31"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_refusals(change, message):
    facts = {
        "arch": "gfx950", "aiter": fake(), "hip": True, "dtype": "bfloat16", "experts": 258,
        "hidden": 6144, "width": 384,
    }  # fmt: skip

    def refuse(facts):
        return refuse_experts(
            ARCHS[facts["arch"]], **{k: v for k, v in facts.items() if k != "arch"}
        )

    assert refuse(facts) is None
    assert re.search(message, refuse(facts | change) or "not refused")


def test_gate_refusals():
    assert "too old" in refuse_gate(ARCHS["gfx942"], fake(), hip=True)
    assert refuse_gate(ARCHS["gfx942"], fake(gate=True), hip=True) is None
    assert "AMD" in refuse_gate(ARCHS["sm90"], fake(gate=True), hip=True)


def test_features_of_releases():
    assert not fake("0.1.7").extra
    assert "splitk" in fake("2026-07").extra
    assert isinstance(find_aiter(), str), "no test machine has ROCm"

    def without_bias2(hidden_states, w1):
        pass

    assert "bias2" in describe(None, without_bias2, without_bias2)


def _plain(x, weights_or_ids, gamma_or_bias, *rest, **arguments):
    if "w13" in arguments:
        return experts_reference(x, weights_or_ids, gamma_or_bias, **arguments)
    return gate_reference(x, weights_or_ids, gamma_or_bias, *rest, **arguments)


FACTS = {"experts": 6, "top_k": 3, "shared": 2, "hidden": 128, "width": 128}


def _compare(aiter):
    return selftest.compare(
        aiter, FACTS, torch.device("cpu"), experts_op=_plain, gate_op=_plain, tokens=(1, 5)
    )


def test_selftest_accepts_the_fake_and_refuses_a_wrong_one():
    assert _compare(fake(gate=True)) is None
    good = fake(gate=True)
    wrong = dataclasses.replace(good, fused_moe=lambda **a: good.fused_moe(**a) * 1.1)
    assert "experts differ" in _compare(wrong)
    poisoned = dataclasses.replace(good, fused_moe=lambda **a: good.fused_moe(**a) * float("nan"))
    assert "experts differ" in _compare(poisoned)

    def unscaled(**arguments):
        good.gate(**(arguments | {"routed_scaling_factor": 1.0}))

    assert "gate agrees" in _compare(dataclasses.replace(good, gate=unscaled))


def test_selftest_survives_a_crash_of_the_child():
    def child(code):
        return selftest.run(FACTS, command=(sys.executable, "-c", code))

    assert "signal 11" in child("import os; os.kill(os.getpid(), 11)")
    assert "boom" in child("raise RuntimeError('boom')")
    assert child("print('{\"reason\": null}')") is None
    assert child("print('noise'); print('{\"reason\": \"no\"}')") == "no"


def test_untuned_shapes():
    rows = list(untuned.rows())
    assert all(len(row) == len(untuned.COLUMNS) for row in rows)
    shapes = {(row[1], row[2], row[3], row[4]) for row in rows}
    assert (6144, 384, 258, 8) in shapes, "Inkling at TP8"
    assert (6144, 3072, 34, 8) in shapes, "Inkling at EP8"
    assert (4096, 512, 258, 8) in shapes, "Inkling-Small at TP4"


def test_untuned_file_is_what_the_module_writes(capsys):
    untuned.main()
    assert capsys.readouterr().out == untuned.FILE.read_text()


@pytest.mark.full
def test_recorded_signature_is_the_published_one(tmp_path):
    """Parsed from the wheel's source, never imported: importing aiter needs ROCm."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--pre",
        "-d",
        str(tmp_path),
        "amd-aiter",
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for file, name in (
            ("aiter/fused_moe.py", "fused_moe"), ("aiter/ops/topk.py", "biased_grouped_topk_hip")
        ):  # fmt: skip
            tree = ast.parse(archive.read(file))
            (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
            names = [a.arg for a in found.args.args]
            wanted = set(COMMON_PARAMETERS) if name == "fused_moe" else set(names)
            assert wanted <= set(names)
            if "0.1.7" in wheel.name:
                assert names == [p["name"] for p in SIGNATURES["0.1.7"][name]]


def test_recorded_calls_reject_what_the_signature_lacks():
    call = recorded(lambda **a: a, "0.1.7", "fused_moe")
    with pytest.raises(TypeError):
        call(1, 2, 3, 4, 5, splitk=1)
