"""The command line as a whole, and `generate`."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from inkling_rocm.cli.main import app
from inkling_rocm.engine import engine as engine_module
from inkling_rocm.engine.ranks import RankLost

RUNNER = CliRunner()
COMMANDS = ("serve", "generate", "ops", "verify", "doctor")


def test_help_names_the_commands_and_needs_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from inkling_rocm.cli.main import app\n"
        "result = CliRunner().invoke(app, ['--help']); print(result.output)\n"
        "assert result.exit_code == 0\n"
        "assert 'torch' not in sys.modules and 'fastapi' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert command in result.stdout


def test_version():
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"inkling-rocm {version('inkling-rocm')}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command):
    assert RUNNER.invoke(app, [command, "--help"]).exit_code == 0


def generate(*arguments, stdin=None):
    options = ["--max-new-tokens", "6", "--temperature", "0"]
    return RUNNER.invoke(app, ["generate", *options, *arguments], input=stdin)


def test_generate_raw_and_from_stdin():
    given = generate("--raw", "Once upon")
    assert given.exit_code == 0, given.output
    assert given.stdout.strip()
    piped = generate("--raw", stdin="Once upon")
    assert piped.stdout == given.stdout


def test_generate_chat():
    result = generate("--system", "Be brief.", "--reasoning-effort", "none", "Hello")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reasoning-effort", "much", "Hello"], "reasoning_effort 'much'"),
        (["--model-path", "/nowhere/at/all", "Hello"], "/nowhere/at/all"),
    ],
)
def test_generate_names_mistakes(arguments, message):
    result = generate(*arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_generate_needs_a_prompt():
    assert generate(stdin=" \n").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", __file__], "is a file; wanted the checkpoint's folder"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_mistakes_are_told_without_a_traceback(command, arguments, message):
    rest = ["Hello"] if command == "generate" else ["--port", "0"]
    result = RUNNER.invoke(app, [command, *arguments, *rest])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize("mode", [["--raw"], []])
def test_generate_fails_when_the_answer_does(monkeypatch, mode):
    def planted(self, *args):
        raise RuntimeError("planted")

    monkeypatch.setattr("inkling_rocm.model.InklingModel.forward", planted)
    result = generate(*mode, "Hello")
    assert result.exit_code == 1
    assert "error: RuntimeError: planted" in result.stderr


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--cuda-graph-bs", "4", "--cuda-graph-bs", "2"], {"cuda_graph_bs": (2, 4)}),
        (["--cuda-graph-max-bs", "3"], {"cuda_graph_max_bs": 3}),
        (["--disable-cuda-graph"], {"disable_cuda_graph": True}),
        (["--cuda-graph-max-bs-prefill", "64"], {"cuda_graph_max_bs_prefill": 64}),
        (["--disable-prefill-cuda-graph"], {"disable_prefill_cuda_graph": True}),
        ([], {"cuda_graph_bs": None, "cuda_graph_max_bs": None, "disable_cuda_graph": False}),
    ],
)
def test_generate_has_the_graph_flags_of_serve(monkeypatch, flags, wanted):
    made = []

    def engine(args):
        made.append({name: getattr(args, name) for name in wanted})
        raise ValueError("enough")

    monkeypatch.setattr("inkling_rocm.engine.Engine", engine)
    assert generate(*flags, "Hello").exit_code == 1
    assert made == [wanted]


def test_generate_tells_of_a_lost_rank(monkeypatch):
    def end(*_):
        raise RankLost("rank 1 has ended with exit code 9")

    monkeypatch.setattr(engine_module, "build_core", end)
    result = generate("Hello")
    assert result.exit_code == 1
    assert "error: rank 1 has ended" in result.stderr
