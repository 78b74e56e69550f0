"""`ops` and `doctor`: what they print, and that mistakes end with a reason and exit code 2 or 1."""

from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

from inkling_rocm.cli import doctor as doctor_module
from inkling_rocm.cli.main import app
from inkling_rocm.ops import OP_NAMES


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_ops_lists_every_op_with_its_variant(small_config_path):
    result = run("ops", "--model-path", str(small_config_path), "--arch", "gfx950", "--tp", "8")
    assert result.exit_code == 0, result.output
    assert "gfx950 (MI355X, MI350X), bfloat16, TP8" in result.output
    for op in OP_NAMES:
        assert any(line.split()[:1] == [op] for line in result.output.splitlines()), op


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "dtype 'int8': choose from auto"),
        (("--arch", "gfx906"), "unknown architecture 'gfx906'; known: gfx942"),
        (("--attention-backend", "fa9"), "--attention-backend fa9: rel_attention has no such"),
        (("--moe-runner-backend", "cutlass"), "--moe-runner-backend cutlass"),
    ],
)
def test_ops_says_why_it_cannot(small_config_path, arguments, message):
    result = run("ops", "--model-path", str(small_config_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_ops_of_a_missing_model(tmp_path):
    result = run("ops", "--model-path", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "nowhere" in result.output


@pytest.mark.parametrize("command", [["verify"], ["parity", "--target", "gfx942"]])
def test_what_needs_triton_says_so(monkeypatch, command):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    result = run(*command)
    assert result.exit_code == 1
    assert "pip install 'inkling-rocm[triton]'" in result.stderr


def test_doctor_reports_and_sizes_a_model(small_config_path):
    result = run("doctor", "--model-path", str(small_config_path), "--tp", "4")
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "device", "triton", "aiter", "can serve"):
        assert word in result.output
    assert "122.8 GiB of bfloat16 weights a rank at TP4" in result.output


def test_doctor_fails_when_something_required_is_missing(monkeypatch):
    found = doctor_module.find_spec
    monkeypatch.setattr(
        doctor_module, "find_spec", lambda name: None if name == "llguidance" else found(name)
    )
    result = run("doctor")
    assert result.exit_code == 1
    assert "cannot serve: llguidance" in result.output


def test_doctor_of_a_missing_model(tmp_path):
    result = run("doctor", "--model-path", str(tmp_path))
    assert result.exit_code == 1
    assert "config.json" in result.output
