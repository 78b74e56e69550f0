"""Running the cases of one tuning row on the emulator and judging what comes out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import triton

from gcn_emulator import EmuError
from gcn_emulator.triton_driver import emulate
from inkling_rocm.verify.metrics import KernelReport, kernel_reports
from kernel_base.register import Case, KernelEntry, Outcome
from kernel_base.tuning import TuningRow

_CASE_ERRORS = (
    EmuError, triton.CompilationError, triton.OutOfResources, RuntimeError, ValueError
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutcomeReport:
    """Largest absolute errors against float64, and what was allowed."""

    output: str
    error: float
    eager_error: float
    budget: float

    @property
    def passed(self) -> bool:
        """A NaN error fails."""
        return self.error <= self.budget


@dataclass(kw_only=True)
class CaseReport:
    """One problem: its outputs, or why it did not finish."""

    case: str
    seconds: float = 0.0
    outcomes: list[OutcomeReport] = field(default_factory=list)
    failure: str | None = None


@dataclass(kw_only=True)
class RowReport:
    """One launcher with one tuning row on one architecture.

    `kernels` are the entry's own; `launched` names everything the cases started (a case may run the
    launchers before and after its own).
    """

    entry: str
    arch: str
    row: TuningRow
    cases: list[CaseReport] = field(default_factory=list)
    kernels: list[KernelReport] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


def judge(outcome: Outcome) -> OutcomeReport:
    """Errors and budget: twice the eager error plus one rounding of the largest reference value.

    Integers and booleans must be equal.
    """
    if outcome.out.shape != outcome.reference.shape:
        return OutcomeReport(
            output=f"{outcome.name}: shape {tuple(outcome.out.shape)}, "
            f"reference {tuple(outcome.reference.shape)}",
            error=float("nan"), eager_error=0.0, budget=0.0,
        )  # fmt: skip
    reference = outcome.reference.double()
    error = _largest(outcome.out.double() - reference)
    if not outcome.out.dtype.is_floating_point:
        return OutcomeReport(output=outcome.name, error=error, eager_error=0.0, budget=0.0)
    eager_error = _largest(outcome.eager.double() - reference)
    floor = torch.finfo(outcome.out.dtype).eps * _largest(reference)
    budget = 2 * eager_error + floor
    return OutcomeReport(output=outcome.name, error=error, eager_error=eager_error, budget=budget)


def _largest(difference: torch.Tensor) -> float:
    """Largest magnitude; NaN anywhere gives NaN, an empty tensor 0."""
    return difference.abs().max().item() if difference.numel() else 0.0


def run_row(entry: KernelEntry, arch: str, row: TuningRow) -> RowReport:
    """Compile and execute every case of a row; the report carries all failures."""
    report = RowReport(entry=entry.name, arch=arch, row=row)
    records = []
    for case in entry.cases(arch, row):
        with emulate(arch, counters=True) as driver:
            report.cases.append(_run_case(case))
        records += driver.records
    own = {path.rpartition(":")[2] for path in entry.kernels}
    report.launched = {record.name for record in records}
    report.kernels = kernel_reports(arch, [record for record in records if record.name in own])
    if not report.cases:
        report.failures.append("no cases")
    for case_report in report.cases:
        if case_report.failure:
            report.failures.append(f"{case_report.case}: {case_report.failure}")
        report.failures += [
            f"{case_report.case}: {o.output}: error {o.error:.3g}, allowed {o.budget:.3g}"
            for o in case_report.outcomes
            if not o.passed
        ]
    report.failures += _resource_failures(report)
    return report


def _run_case(case: Case) -> CaseReport:
    report = CaseReport(case=case.name)
    start = time.perf_counter()
    try:
        report.outcomes = [judge(outcome) for outcome in case.run(torch.device("cpu"))]
        if not report.outcomes:
            report.failure = "no outputs"
    except (
        EmuError,
        triton.CompilationError,
        triton.OutOfResources,
        RuntimeError,
        ValueError,
    ) as e:
        # the run goes on to the next case, so that one report names every failing kernel
        report.failure = f"{type(e).__name__}: {str(e).strip() or 'no message'}"
    report.seconds = round(time.perf_counter() - start, 3)
    return report


def _resource_failures(report: RowReport) -> list[str]:
    failures = []
    for kernel in report.kernels:
        spilled = kernel.spills or kernel.scratch_bytes
        if spilled and report.row.accepted_spills is None:
            failures.append(
                f"{kernel.kernel}: {kernel.spills} registers spilled, {kernel.scratch_bytes} bytes "
                "of scratch per lane; choose smaller tiles or state accepted_spills in the row"
            )
        if kernel.lds_bytes > kernel.lds_limit_bytes:
            failures.append(
                f"{kernel.kernel}: {kernel.lds_bytes} bytes of LDS, limit {kernel.lds_limit_bytes}"
            )
        if kernel.waves_per_simd < 1:
            failures.append(f"{kernel.kernel}: cannot launch, its registers do not fit a SIMD")
    return failures
