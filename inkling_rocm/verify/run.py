"""The verify command: choose entries and rows, run them, print, write the reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from inkling_rocm.verify.cases import RowReport, run_row
from inkling_rocm.verify.report import as_json, as_markdown, describe_row, summary_lines
from inkling_rocm.verify.source_scan import package_jit_functions, unregistered
from kernel_base.register import KernelEntry, entries

EMULATED_ARCHS = ("gfx942", "gfx950")


def select_entries(names: Sequence[str], available: Iterable[KernelEntry]) -> list[KernelEntry]:
    """The entries called `names`, or whose package is; all of them if `names` is empty.

    Raises: ValueError: a name matches nothing; the message lists what there is.
    """
    available = list(available)
    if not names:
        return available
    chosen = []
    for name in names:
        matching = [e for e in available if e.name == name or e.name.startswith(f"{name}.")]
        if not matching:
            known = ", ".join(e.name for e in available) or "none"
            raise ValueError(f"no registered launcher {name!r}; there are: {known}")
        chosen += [e for e in matching if e not in chosen]
    return chosen


def verify(
    archs: Sequence[str] = EMULATED_ARCHS,
    ops: Sequence[str] = (),
    json_path: Path | None = None,
    markdown_path: Path | None = None,
    *,
    launchers: Iterable[KernelEntry] | None = None,
    scan: bool = True,
    say: Callable[[str], None] = print,
) -> int:
    """Compile every tuning row, run its cases on the emulator against the reference, report.

    Args:
        archs: gfx942 and/or gfx950.
        ops: launcher names ("package.launcher") or packages; empty = all.
        json_path, markdown_path: where to write the reports; None = nowhere.
        launchers: what to verify instead of the installed packages' register.
        scan: also fail for kernels in the source tree that no entry names.
        say: gets every line of output.

    Returns: the number of failures: 0 = verified.
    Raises: ValueError: an architecture that is not emulated, or an unknown launcher.
    """
    unknown = [a for a in archs if a not in EMULATED_ARCHS]
    if unknown:
        raise ValueError(
            f"cannot emulate {', '.join(unknown)}; choose from {', '.join(EMULATED_ARCHS)}"
        )
    available = list(entries() if launchers is None else launchers)
    functions = package_jit_functions()
    not_for_amd = {f.path for f in functions if f.nvidia_only}
    reports: list[RowReport] = []
    failures: list[str] = []
    if scan and not ops:
        failures += [
            f"{path}: a kernel no register entry names"
            for path in unregistered(functions, available)
        ]
    for entry in select_entries(ops, available):
        for arch in archs:
            rows = entry.table.for_arch(arch)
            if not rows:
                say(f"{entry.name} {arch}: no tuning row, not offered there")
            mine = []
            for row in rows:
                report = run_row(entry, arch, row)
                mine.append(report)
                for line in summary_lines(report):
                    say(line)
            reports += mine
            failures += _row_failures(mine)
            if mine:
                failures += _coverage_failures(entry, arch, mine, available, not_for_amd)
    left_out = sorted(not_for_amd & {k for e in select_entries(ops, available) for k in e.kernels})
    for kernel in left_out:
        say(f"{kernel}: written for NVIDIA GPUs only, left out")
    for path, render in ((json_path, as_json), (markdown_path, as_markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(archs, reports, failures, left_out))
    say(
        f"{len(reports)} rows, {sum(len(r.cases) for r in reports)} cases, {len(failures)} failures"
    )
    for failure in failures:
        say(f"FAILED {failure}")
    return len(failures)


def _row_failures(reports: list[RowReport]) -> list[str]:
    return [
        f"{r.entry} {r.arch} [{describe_row(r.row)}]: {failure}"
        for r in reports
        for failure in r.failures
    ]


def _function_names(launchers: Iterable[KernelEntry]) -> set[str]:
    return {path.rpartition(":")[2] for entry in launchers for path in entry.kernels}


def _coverage_failures(
    entry: KernelEntry,
    arch: str,
    reports: list[RowReport],
    available: list[KernelEntry],
    not_for_amd: set[str],
) -> list[str]:
    """The cases must launch every kernel the entry names, and none that no entry names.

    Kernels in `not_for_amd` cannot be compiled for these architectures.
    """
    launched = set().union(*(r.launched for r in reports))
    where = f"{entry.name} {arch}"
    wanted = {path.rpartition(":")[2] for path in entry.kernels if path not in not_for_amd}
    missing = sorted(wanted - launched)
    stray = sorted(launched - _function_names(available))
    return [f"{where}: no case launches {name}" for name in missing] + [
        f"{where}: launches {name}, which no entry names" for name in stray
    ]
