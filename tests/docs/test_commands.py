"""Command lines in the docs have only options that there are, and modules that there are."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from inkling_rocm.cli.main import app

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app).commands
LINE = re.compile(rf"inkling-rocm ((?:{'|'.join(COMMANDS)})\b[^`\n]*)")


def options_of(command) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


def unknown_options(text: str) -> list[tuple[str, str]]:
    """Of every command line in a text, the options that its command does not have."""
    found = []
    for line in LINE.findall(text.replace("\\\n", " ")):
        name, *words = line.split()
        command = COMMANDS[name]
        if name == "bench":
            if not words or words[0] not in command.commands:
                continue
            command = command.commands[words[0]]
        if "--engine sglang" in line and name == "serve":
            continue  # the rest is SGLang's
        given = re.findall(r"(?<!\S)--[a-z][a-z-]*", line)
        found += [(line, option) for option in given if option not in options_of(command)]
    return found


DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docker/*.md"),
]


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_command_lines_are_possible(file):
    text = file.read_text(encoding="utf-8")
    assert not unknown_options(text)
    modules = set(re.findall(r"python3? -m ((?:bench|inkling_rocm)[\w.]*)", text))
    assert not [name for name in modules if find_spec(name.rstrip(".")) is None]


def test_an_option_that_is_not_there_is_noticed():
    text = "`inkling-rocm serve --model-path x --tensor-size 8`, `inkling-rocm bench layer --tp 2`"
    assert [option for _, option in unknown_options(text)] == ["--tensor-size", "--tp"]
