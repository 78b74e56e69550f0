"""Result rows: what a benchmark appends to bench/results/*.jsonl, the same fields everywhere."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "triton", "numpy", "transformers")


def provenance() -> dict:
    """Commit (and whether the tree differs from it), Python and package versions."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench")),
        "versions": {"python": platform.python_version(), **_package_versions()},
    }


def result_row(
    op: str,
    case: str,
    *,
    device: str,
    arch: str,
    gate: str,
    evidence: Literal["measured", "emulated", "modelled"],
    **measurements,
) -> dict:
    """One row. `gate` is the outcome of the correctness check that came before the measurement;
    measurements carry their unit in the name (p50_us, tokens_per_s, ratio)."""
    return {
        "op": op,
        "case": case,
        "device": device,
        "arch": arch,
        **measurements,
        "gate": gate,
        "evidence": evidence,
        **provenance(),
    }


class Rows:
    """Appends measured rows of one device to a file as they come, so that an interrupted run keeps
    what it measured."""

    def __init__(self, path: str, *, device: str, arch: str):
        self.path, self.device, self.arch = path, device, arch

    def add(self, op: str, case: str, outcome: str, **measurements) -> None:
        row = result_row(
            op, case, device=self.device, arch=self.arch, gate=outcome, evidence="measured",
            **measurements,
        )  # fmt: skip
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(op, case, outcome, measurements, flush=True)


def read(file: Path) -> list[dict]:
    """The rows of a file, in order."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def evidence(*rows: dict) -> str:
    """Where rows of one kind and device are from, as tables say it: "measured, NVIDIA H200, commit
    0123abc", with all commits where there are several."""
    ((kind, device),) = {(row["evidence"], row["device"]) for row in rows}
    commits = dict.fromkeys(row["commit"] for row in rows)
    return f"{kind}, {device}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def append(name: str, rows: list[dict]) -> Path:
    """Append rows to bench/results/{name}.jsonl and return the file."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.jsonl"
    with file.open("a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
    return file


def _package_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    """Output of a git command; empty where there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no provenance: {error}", file=sys.stderr)
        return ""
    return done.stdout.strip()
