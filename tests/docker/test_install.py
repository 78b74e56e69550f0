"""The images' install step, run for real in a virtual environment that poses as an SGLang image."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What an image brings, as metadata only: enough for pip, and for seeing whether it was touched.
IMAGE = {
    "torch": "2.9.0+rocm7.2",
    "triton": "3.5.1+rocm7.2",
    "amd-aiter": "0.1.9",
    "sglang": "0.5.23+rocm720",
    "tml-renderers": "0.1.0",
}


def pretend(site: Path, name: str, version: str) -> None:
    """Puts a distribution without any files of its own into site-packages."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("pip\n")


class Image:
    """A virtual environment with the packages of an image."""

    def __init__(self, folder: Path, packages: dict[str, str], *, with_pip: bool) -> None:
        venv.create(folder, with_pip=with_pip)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python3*/site-packages"))
        for name, version in packages.items():
            pretend(self.site, name, version)

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, "PYTHON": str(self.python), "PYTHONPATH": "", **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def held(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(self.python, "docker/held.py", *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Image:
    image = Image(tmp_path_factory.mktemp("image") / "venv", IMAGE, with_pip=True)
    result = image.run("bash", "docker/install.sh", ".", "0.5.23")
    assert result.returncode == 0, result.stdout + result.stderr
    return image


def versions(image: Image, *names: str) -> list[str]:
    code = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    return image.run(image.python, "-c", code, *names).stdout.split()


def test_the_install_leaves_the_image_as_it_was(installed):
    assert versions(installed, *IMAGE) == list(IMAGE.values())


def test_the_installed_command_runs(installed):
    result = installed.run(installed.python.with_name("inkling-rocm"), "--help")
    assert result.returncode == 0, result.stderr
    assert "serve" in result.stdout


def test_kernels_are_registered_from_the_installed_wheel(installed):
    code = (
        "from importlib.metadata import entry_points\n"
        "print(sorted(e.name for e in entry_points(group='kernel_base.kernels')))"
    )
    assert "'triton_attn'" in installed.run(installed.python, "-c", code).stdout


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({}, "sglang is not installed"),
        ({"sglang": "0.5.22"}, "sglang is 0.5.22, wanted 0.5.23"),
        ({"sglang": "0.5.23.post1"}, "sglang is 0.5.23.post1, wanted 0.5.23"),
    ],
)
def test_an_image_of_another_sglang_is_refused_before_anything_is_installed(
    tmp_path, packages, message
):
    image = Image(tmp_path / "venv", packages, with_pip=False)
    result = image.run("bash", "docker/install.sh", ".", "0.5.23")
    assert result.returncode != 0
    assert message in result.stderr


def test_a_changed_package_fails_the_build(tmp_path):
    image = Image(tmp_path / "venv", IMAGE, with_pip=False)
    held = tmp_path / "held.txt"
    assert image.held("write", held).returncode == 0
    assert image.held("check", held).returncode == 0
    (image.site / "triton-3.5.1+rocm7.2.dist-info").rename(image.site / "gone")
    pretend(image.site, "triton", "3.9.0")
    result = image.held("check", held)
    assert result.returncode == 1
    assert "triton: was 3.5.1+rocm7.2, is 3.9.0" in result.stderr


def test_the_health_check_follows_the_server(tmp_path):
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()

    def exit_status() -> int:
        environment = {**os.environ, "PORT": str(server.server_port)}
        command = [sys.executable, str(ROOT / "docker" / "healthcheck.py")]
        return subprocess.run(command, env=environment, check=False).returncode

    assert exit_status() == 0
    server.shutdown()
    server.server_close()
    assert exit_status() == 1


@pytest.fixture
def entrypoint(tmp_path):
    """Runs the entrypoint with commands that only say what they were given."""

    def run(*arguments: str, doctor: int = 0) -> subprocess.CompletedProcess[str]:
        for name, status in (("inkling-rocm", doctor), ("python3", 0)):
            command = tmp_path / name
            command.write_text(f'#!/bin/sh\necho {name} "$@"\nexit {status}\n')
            command.chmod(0o755)
        return subprocess.run(
            ["bash", ROOT / "docker" / "entrypoint.sh", *arguments],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": "31000"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize("arguments", [[], ["--model-path", "m", "--tp", "8"]])
def test_the_entrypoint_serves_after_the_doctor(entrypoint, arguments):
    launch = "python3 -m sglang.launch_server --host 0.0.0.0 --port 31000"
    assert entrypoint(*arguments).stdout.splitlines() == [
        "inkling-rocm doctor --engine sglang",
        " ".join([launch, *arguments]),
    ]


def test_the_entrypoint_does_not_serve_against_the_doctors_word(entrypoint):
    result = entrypoint("--tp", "8", doctor=1)
    assert result.returncode == 1
    assert "launch_server" not in result.stdout


def test_the_entrypoint_runs_another_command(entrypoint):
    assert entrypoint("inkling-rocm", "ops").stdout == "inkling-rocm ops\n"
