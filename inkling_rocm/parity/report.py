"""A comparison as text: one line an op of a layer, the worst of its calls and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from inkling_rocm.parity.compare import Comparison, Site, compare
from inkling_rocm.parity.problems import PROBLEMS, problem_named
from inkling_rocm.parity.recording import Difference, differences, file_name, load, save
from inkling_rocm.parity.run import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def summary(comparison: Comparison) -> list[str]:
    """Heading, a line an op site, and the verdict."""
    worst: dict[str, list[Site]] = {}
    for site in comparison.sites:
        worst.setdefault(site.site, []).append(site)
    lines = [
        f"{comparison.problem} {comparison.dtype} {comparison.target}",
        f"  {'layer.half.op':<32} {'own':>9} {'allowed':>9} {'same':>9} {'allowed':>9}",
    ]
    for name, sites in worst.items():
        own = max(sites, key=lambda s: _excess(s.own, s.own_budget))
        same = max(sites, key=lambda s: _excess(s.same, s.same_budget))
        ok = own.own_ok and same.same_ok
        lines.append(
            f"  {name:<32} {own.own:9.2g} {own.own_budget:9.2g} {same.same:9.2g} "
            f"{same.same_budget:9.2g}{'' if ok else '  EXCEEDED'}"
        )
    fault = comparison.first_fault()
    if fault is not None:
        what = "wrong on its own inputs" if not fault.same_ok else "out of its budget"
        lines.append(
            f"  first fault: {fault.site}, output {fault.output}, forward {fault.forward}: {what}"
        )
    if comparison.tokens:
        lines.append(f"  engine tokens equal the CPU's: {comparison.tokens_equal}")
    return lines


def _excess(error: float, budget: float) -> float:
    """NaN is the worst there is."""
    return float("inf") if error != error else error / budget


def difference_line(found: Sequence[Difference], equal_tokens: bool, device: str) -> str:
    """The output that is furthest apart and, if some are too far, the first of them: there the two
    targets part."""
    compared = [d for d in found if d.compared]
    worst = max(compared, key=lambda d: _excess(d.error, d.budget))
    first = next((d for d in found if not d.ok), None)
    verdict = "within budget" if first is None else f"EXCEEDED, first at {_where(first)}"
    left_out = len(found) - len(compared)
    parted = f"; {left_out} of {len(found)} outputs come after experts chosen within rounding"
    return (
        f"  beside {device}: worst {_where(worst)} {worst.error:.2g} of {worst.budget:.2g}, "
        f"{verdict}{parted if left_out else ''}; engine tokens equal: {equal_tokens}"
    )


def _where(found: Difference) -> str:
    return f"{found.site} (output {found.output}, forward {found.forward})"


def parity(
    targets: Sequence[str],
    problems: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    *,
    record: Path | None = None,
    against: Path | None = None,
    device: str = "",
    commit: str = "",
    versions: dict[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> tuple[list[dict], int]:
    """Compare every target on every problem, print, record, compare with recordings.

    Args:
        problems, dtypes: empty = all. record: folder to write the targets' outputs to (one target).
        against: folder of recordings to compare with. device, commit, versions: provenance of a
            recording.
    Returns: (results as JSON, number of failures).
    Raises: ValueError: an unknown name, or a recording of other weights.
    """
    if record is not None and len(targets) != 1:
        raise ValueError(f"recording takes one target, got {', '.join(targets)}")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise ValueError(f"dtype {unknown[0]!r}: choose from {', '.join(DTYPES)}")
    chosen = [problem_named(name) for name in problems or PROBLEMS]
    results, failures = [], 0
    for target in map(Target.named, targets):
        for problem in chosen:
            for dtype in dtypes or DTYPES:
                found = compare(problem, target, DTYPES[dtype])
                ok = found.passed
                for line in summary(found):
                    say(line)
                result = found.as_json()
                if record is not None:
                    save(
                        found, problem, record, device=device, commit=commit,
                        versions=versions or {},
                    )  # fmt: skip
                if against is not None:
                    recording = load(against / file_name(problem.name, dtype), problem)
                    apart = differences(found, recording.kept)
                    tokens = found.tokens == recording.tokens
                    say(difference_line(apart, tokens, recording.device))
                    near = all(d.ok for d in apart) and (tokens or dtype != "float32")
                    ok &= near
                    compared = [d for d in apart if d.compared]
                    result["beside"] = {
                        "device": recording.device,
                        "commit": recording.commit,
                        "tokens_equal": tokens,
                        "passed": near,
                        "compared": len(compared),
                        "worst_of_budget": round(
                            max(_excess(d.error, d.budget) for d in compared), 3
                        ),
                    }
                results.append(result)
                failures += not ok
    say(f"{len(results)} comparisons, {failures} failures")
    return results, failures
