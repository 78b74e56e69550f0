"""Starts driver.py in SGLang's virtual environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
needs_sglang = pytest.mark.skipif(
    not PYTHON.exists(), reason="bash tests/run makes .venv-sglang, SGLang's environment"
)


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs SGLang on a CPU."""
    paths = (str(HERE / "cpu_stub"), str(HERE))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        **more,
    }


def run_scenarios(
    checkpoint: Path,
    out: Path,
    scenarios: list[str],
    *,
    page_size: int = 64,
    arguments: dict | None = None,
    timeout: float = 420,
    **variables: str,
) -> tuple[dict, str]:
    """(results by scenario, what the engine printed). results are {} when the engine ended before
    it wrote them.

    Args: arguments: more of sglang.Engine's. variables: of the environment.
    """
    command = [str(PYTHON), str(HERE / "driver.py"), str(checkpoint), str(page_size), str(out)]
    done = subprocess.run(
        [*command, *scenarios],
        env=environment(DRIVER_ARGUMENTS=json.dumps(arguments or {}), **variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    text = done.stdout + done.stderr
    return (json.loads(out.read_text()) if out.exists() else {}), text
