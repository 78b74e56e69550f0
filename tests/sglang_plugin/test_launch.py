"""`inkling-rocm serve --engine sglang` hands its arguments over unchanged."""

import sys

import pytest

from inkling_rocm.cli.sglang_launch import sglang_command

SERVER = [sys.executable, "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["serve", "--engine", "sglang", "--tp", "8"], ["--tp", "8"]),
        (["serve", "--model-path", "m", "--engine=sglang"], ["--model-path", "m"]),
    ],
)  # fmt: skip
def test_arguments_go_over_as_they_are(arguments, wanted):
    assert sglang_command(arguments) == [*SERVER, *wanted]


@pytest.mark.parametrize(
    "arguments",
    [[], ["serve"], ["doctor", "--engine", "sglang"], ["serve", "--engine", "embedded"]],
)
def test_everything_else_stays_here(arguments):
    assert sglang_command(arguments) is None
