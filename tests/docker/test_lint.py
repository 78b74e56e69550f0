"""The Docker files pass hadolint and keep what the images promise; the linter can find a fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    assert HADOLINT.is_file(), f"{HADOLINT} is missing: pip install -e '.[test]'"
    return subprocess.run(
        [HADOLINT, "--no-color", file], capture_output=True, text=True, check=False
    )


def instructions(file: Path) -> list[str]:
    """The file's instructions, continuation lines joined, comments dropped."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", "").splitlines() if line.strip()]


def test_there_is_one_per_vendor():
    assert [file.name for file in FILES] == ["cuda.Dockerfile", "rocm.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_passes_hadolint(file):
    result = lint(file)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("USER 0\n", "DL3002"),
        ("RUN cd /opt && pip install numpy\n", "DL3013"),
        ('ENTRYPOINT ["/bin/true"]\n', "DL4004"),
        ("RUN echo $UNQUOTED_\n", "SC2086"),
    ],
)
def test_hadolint_finds_a_planted_fault(tmp_path, fault, rule):
    file = tmp_path / "Dockerfile"
    file.write_text((DOCKER / "rocm.Dockerfile").read_text() + fault)
    result = lint(file)
    assert result.returncode != 0
    assert rule in result.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_serves_as_another_user_than_root_with_a_health_check(file):
    steps = instructions(file)
    users = [step.split()[1] for step in steps if step.startswith("USER ")]
    assert users[-1] == "${USER_ID}"
    assert any(step.startswith("HEALTHCHECK ") and "healthcheck.py" in step for step in steps)
    assert sum(step.startswith("ENTRYPOINT ") for step in steps) == 1
    # Every copied path exists, and the context's allow list lets it through.
    allowed = (DOCKER.parent / ".dockerignore").read_text().split()
    for step in steps:
        if step.startswith("COPY "):
            for source in step.split()[1:-1]:
                assert (DOCKER.parent / source).exists(), source
                assert f"!{source}" in allowed, source


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_versions_are_arguments(file):
    steps = instructions(file)
    first = next(step for step in steps if step.startswith("FROM "))
    assert first == "FROM ${BASE_IMAGE}"
    pinned = (DOCKER.parent / "pyproject.toml").read_text()
    version = next(step for step in steps if step.startswith("ARG SGLANG_VERSION=")).split("=")[1]
    assert f'"sglang=={version}"' in pinned
    assert [step for step in steps if "install" in step and step.startswith("RUN")] == [
        'RUN bash docker/install.sh . "${SGLANG_VERSION}"     '
        '&& useradd --create-home --uid "${USER_ID}" inkling'
    ]
