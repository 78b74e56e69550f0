"""What a target gave, in a small file: so that machines that never meet can be compared.

safetensors: one tensor an op output, named "forward/site/output"; tokens and provenance in the
metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from inkling_rocm.parity.compare import Comparison, Key, error_of
from inkling_rocm.parity.problems import Problem
from inkling_rocm.parity.routing import is_choice, shortfall
from inkling_rocm.parity.run import make_weights


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Outputs and engine tokens of one problem in one dtype on one device, and where that was."""

    problem: str
    dtype: str
    device: str
    commit: str
    versions: dict[str, str]
    weights: str
    tokens: list[list[int]]
    kept: dict[Key, Tensor]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two targets are apart at one op output; the budget is the sum of theirs. `compared`
    is False for what comes after a choice of experts that fell differently within its budget."""

    forward: int
    site: str
    output: str
    error: float
    budget: float
    compared: bool = True

    @property
    def ok(self) -> bool:
        return not self.compared or self.error <= self.budget


def weights_digest(problem: Problem) -> str:
    """A hash of the problem's fp32 weights: a recording of other weights is of another model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(make_weights(problem, torch.float32, torch.device("cpu")).items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def file_name(problem: str, dtype: str) -> str:
    return f"{problem}_{dtype}.safetensors"


def save(
    comparison: Comparison,
    problem: Problem,
    folder: Path,
    *,
    device: str,
    commit: str,
    versions: dict[str, str],
) -> Path:
    """Write a comparison's outputs and tokens to `folder`, and on what and of what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(comparison.problem, comparison.dtype)
    facts = {
        "problem": comparison.problem,
        "dtype": comparison.dtype,
        "device": device,
        "commit": commit,
        "versions": versions,
        "weights": weights_digest(problem),
        "tokens": comparison.tokens,
    }
    tensors = {"/".join(map(str, key)): t.contiguous() for key, t in comparison.kept.items()}
    save_file(tensors, path, metadata={"parity": json.dumps(facts)})
    return path


def load(path: Path, problem: Problem) -> Recording:
    """Read a recording.

    Raises: ValueError: it is of other weights than the problem's.
    """
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["parity"])
        kept: dict[Key, Tensor] = {}
        for name in list(file.keys()):
            forward, site, output = name.split("/")
            kept[int(forward), site, output] = file.get_tensor(name)
    if facts["weights"] != weights_digest(problem):
        raise ValueError(
            f"{path.name} was recorded with other weights than {problem.name} has now; record it "
            "again with `inkling-rocm parity --target cuda --record`"
        )
    return Recording(**facts, kept=kept)


def differences(comparison: Comparison, recording: Mapping[Key, Tensor]) -> list[Difference]:
    """The comparison's target beside a recorded one, in the order of execution.

    Raises: ValueError: they did not run the same ops.
    """
    ours = {(s.forward, s.site, s.output) for s in comparison.sites}
    if ours != set(recording):
        odd = sorted(ours ^ set(recording))[:3]
        raise ValueError(f"the recording has other ops than this run, for example {odd}")
    found, compared = [], True
    for s in comparison.sites:
        got, other = (kept[s.forward, s.site, s.output] for kept in (comparison.kept, recording))
        if is_choice(s.site, s.output):
            error = s.own + shortfall(comparison.scores[s.forward, s.site], other)
        else:
            error = error_of(got, other)
        found.append(
            Difference(
                forward=s.forward, site=s.site, output=s.output, error=error,
                budget=2 * s.own_budget, compared=compared,
            )
        )  # fmt: skip
        if is_choice(s.site, s.output) and not torch.equal(got, other):
            compared = False
    return found
