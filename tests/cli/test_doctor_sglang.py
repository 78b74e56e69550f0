"""`doctor --engine sglang` against small packages that pose as SGLang, as its loader behaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from inkling_rocm.cli.doctor_sglang import judge
from inkling_rocm.cli.main import app

# SGLang's loader in short: plugin errors are logged, never raised.
PLUGINS = """
import logging
from importlib.metadata import entry_points
logger = logging.getLogger(__name__)
def load_plugins():
    for entry in entry_points(group="sglang.srt.plugins", name="posing"):  # not the real plugin
        try:
            entry.load()()
        except Exception:
            logger.exception("Failed to load plugin %s", entry.name)
"""
REGISTRY = """
class InklingForConditionalGeneration:
    __module__ = "sglang.srt.models.inkling"
class ModelRegistry:
    models = {"InklingForConditionalGeneration": InklingForConditionalGeneration}
"""
WORKING = """
def register():
    from sglang.srt.models.registry import ModelRegistry
    class InklingForConditionalGeneration:
        __module__ = "inkling_rocm.sglang_plugin.models.inkling"
    ModelRegistry.models["InklingForConditionalGeneration"] = InklingForConditionalGeneration
"""
BROKEN = "raise ImportError('no such kernel')\n"


def report(*arguments: str):
    result = CliRunner().invoke(app, ["doctor", "--engine", "sglang", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def sglang(tmp_path, monkeypatch):
    """Installs a pretended SGLang of `version` with a plugin module of ours; returns nothing."""
    for name in ("SGLANG_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)

    def write(path: str, text: str = "") -> None:
        file = Path(tmp_path, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def install(plugin: str | None, version: str = "0.5.23", plugins: str = PLUGINS) -> None:
        for package in ("sglang", "sglang/srt", "sglang/srt/models"):
            write(f"{package}/__init__.py")
        write("sglang/srt/plugins/__init__.py", plugins)
        write("sglang/srt/models/registry.py", REGISTRY)
        info = f"sglang-{version}.dist-info"
        write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        if plugin is not None:
            write("posing_plugin.py", plugin)
            info = "posing-1.dist-info"
            write(f"{info}/METADATA", "Metadata-Version: 2.1\nName: posing\nVersion: 1\n")
            # In SGLang's process only its own loader imports this.
            write(
                f"{info}/entry_points.txt",
                "[sglang.srt.plugins]\nposing = posing_plugin:register\n",
            )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_an_active_plugin_can_serve(sglang, small_config_path):
    sglang(WORKING)
    code, output = report("--model-path", str(small_config_path), "--tp", "8")
    assert code == 0, output
    assert "sglang        0.5.23, plugin made for 0.5.23" in output
    assert "model         inkling_rocm.sglang_plugin.models.inkling.Inkling" in output
    assert "cutlass-dsl   missing: not needed by our model" in output
    for op in ("rel_attention", "experts", "residual_conv_norm"):
        assert any(line.split()[:1] == [op] for line in output.splitlines()), output


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (None, "SGLang would serve sglang.srt.models.inkling"),
        (BROKEN, "Failed to load plugin posing: ImportError('no such kernel')"),
    ],
)
def test_it_says_when_sglangs_own_model_would_serve(sglang, plugin, message):
    sglang(plugin)
    code, output = report()
    assert code == 1
    assert message in output
    assert "cannot serve: the plugin is not active" in output


def test_another_version_of_sglang_cannot_serve(sglang):
    sglang(WORKING, version="0.5.24")
    code, output = report()
    assert code == 1
    assert "cannot serve: sglang is 0.5.24, wanted 0.5.23" in output


def test_an_sglang_that_does_not_import_is_told_with_its_reason(sglang):
    sglang(WORKING, plugins="import no_such_library\n")
    code, output = report()
    assert code == 1
    assert "SGLang cannot be imported (ModuleNotFoundError: No module named 'no_such_lib" in output


def test_without_sglang():
    code, output = report()
    assert code == 1
    assert "cannot serve: sglang is not installed" in output


def test_unknown_engine():
    result = CliRunner().invoke(app, ["doctor", "--engine", "vllm"])
    assert result.exit_code == 2
    assert "choose from embedded, sglang" in result.output


ANSWER = {
    "sglang": "0.5.23+rocm720",
    "pinned": "0.5.23",
    "cutlass": None,
    "external": "",
    "allowed": "",
    "plugins": ["inkling_rocm"],
    "errors": [],
    "refusal": None,
    "model": "inkling_rocm.sglang_plugin.models.inkling.InklingForConditionalGeneration",
}


@pytest.mark.parametrize(
    ("difference", "line", "can_serve"),
    [
        ({}, "plugin        entry point inkling_rocm", True),
        ({"allowed": "other"}, "left out by SGLANG_PLUGINS=other: add inkling_rocm", True),
        ({"plugins": []}, "no entry point of inkling-rocm: install it with pip", True),
        ({"pinned": None}, "plugin made for unknown", False),
        (
            {"external": "inkling_rocm.sglang_plugin.models"},
            "selected by SGLANG_EXTERNAL_MODEL_PACKAGE=inkling_rocm.sglang_plugin.models",
            True,
        ),
        ({"refusal": "ImportError: x"}, "entry point inkling_rocm", False),
        ({"model": None}, "model         none registered", False),
    ],
)
def test_judgement(difference, line, can_serve):
    lines, problems = judge({**ANSWER, **difference})
    assert line in "\n".join(lines)
    assert (not problems) == can_serve
