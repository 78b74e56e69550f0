"""`inkling-rocm verify`: what it reports, and that each kind of failure is one."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from typer import Typer
from typer.testing import CliRunner

from gcn_emulator import Counters, StaticInfo
from gcn_emulator.triton_driver import LaunchRecord
from inkling_rocm.cli.verify import verify as command
from inkling_rocm.verify import verify
from inkling_rocm.verify.cases import judge
from inkling_rocm.verify.metrics import kernel_reports
from inkling_rocm.verify.source_scan import (
    jit_functions,
    missing_kernels,
    package_jit_functions,
    unregistered,
)
from kernel_base.register import Case, KernelEntry, Outcome, entries
from kernel_base.tuning import TuningRow, TuningTable

sys.path.insert(0, str(Path(__file__).parent.parent / "gcn_emulator"))
from score_mods import ENTRY


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * FACTOR, mask=offs < n)


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) * FACTOR)


@triton.jit
def spilling_kernel(x_ptr, y_ptr, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    m, k = tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + m * 128 + k)
    tl.store(y_ptr + m * 128 + k, x * tl.sum(x, 1)[:, None] - tl.sum(x, 0)[None, :] * FACTOR)


def make_entry(
    kernel=scale_kernel, factor=3.0, truth=3.0, sizes=(1, 63, 200), archs=("gfx950",), **row
):
    """An entry whose kernel multiplies by `factor` while the reference multiplies by `truth`."""
    rows = tuple(
        TuningRow(
            arch=arch,
            constexprs={"BLOCK": 64},
            options={"num_warps": 1} | row.get("options", {}),
            evidence="guess",
            source="test",
            accepted_spills=row.get("accepted_spills"),
        )
        for arch in archs
    )

    def cases(arch, tuning):
        for n in sizes:

            def run(device, n=n):
                x = torch.randn(n, device=device)
                y = torch.full_like(x, float("nan"))
                grid = (triton.cdiv(n, 64) if kernel is not spilling_kernel else 1,)
                kernel[grid](x, y, n, FACTOR=factor, **tuning.launch_kwargs())
                if kernel is spilling_kernel:
                    m = x.double().reshape(64, 128)
                    want = (m * m.sum(1, keepdim=True) - m.sum(0) * truth).reshape(-1)
                    return [Outcome(name="y", out=y, reference=want, eager=want.float() + 1e-3)]
                return [Outcome(name="y", out=y, reference=x.double() * truth, eager=x * truth)]

            yield Case(name=f"{n} elements", run=run)

    return KernelEntry(
        name="test.scale",
        kernels=(f"test_verify:{kernel.__name__}",),
        table=TuningTable("scale", rows),
        cases=cases,
    )


def run(*launchers, archs=("gfx950",), ops=(), paths=(None, None)):
    """-> (number of failures, printed lines)."""
    lines = []
    count = verify(archs, ops, *paths, launchers=launchers, scan=False, say=lines.append)
    return count, lines


def test_reports_of_a_matrix_kernel(tmp_path):
    paths = tmp_path / "report" / "verify.json", tmp_path / "verify.md"
    count, lines = run(ENTRY, archs=("gfx942", "gfx950"), paths=paths)
    assert count == 0, lines
    report = json.loads(paths[0].read_text())
    assert report["evidence"] == "emulated"
    assert report["versions"]["triton"] == triton.__version__
    assert [r["arch"] for r in report["rows"]] == ["gfx942", "gfx950"]
    for row in report["rows"]:
        assert len(row["cases"]) == 5
        assert all(o["error"] <= o["budget"] for c in row["cases"] for o in c["outcomes"])
        assert row["row"]["constexprs"] == {"BLOCK_M": 32, "BLOCK_N": 32}
        limit = 65536 if row["arch"] == "gfx942" else 163840
        for kernel in row["kernels"]:
            assert kernel["kernel"] == "score_mod_kernel"
            assert kernel["spills"] == kernel["scratch_bytes"] == 0
            assert 0 < kernel["lds_bytes"] <= limit == kernel["lds_limit_bytes"]
            assert 1 <= kernel["waves_per_simd"] <= 8
            assert 0 < kernel["wide_load_share"] <= 1
            assert kernel["lds_conflict_factor"] >= 1
            assert 0 < kernel["matrix_to_vector"] < 1
        shapes = {s for k in row["kernels"] for s in k["matrix_shapes"]}
        assert f"f32_16x16x{16 if row['arch'] == 'gfx942' else 32}_bf16" in shapes
    table = paths[1].read_text()
    assert "**emulated**" in table
    assert "No failures" in table
    assert table.count("tests.score_mod_attention: `score_mod_kernel`") == sum(
        len(r["kernels"]) for r in report["rows"]
    )
    assert any("no races" in line for line in lines)


def test_a_wrong_kernel_fails():
    count, lines = run(make_entry(factor=3.0001))
    assert count == 3
    assert any(
        "FAILED test.scale gfx950 [BLOCK=64, num_warps=1]: 63 elements: y: error" in x
        for x in lines
    )
    assert run(make_entry())[0] == 0


def test_an_out_of_bounds_access_fails_and_the_other_cases_still_run():
    count, lines = run(make_entry(unmasked_kernel, sizes=(63, 64)))
    assert count == 1
    assert "63 elements: EmuError: unmasked_kernel: line" in lines[-1]


def test_spills_fail_unless_the_row_accepts_them():
    entry = make_entry(spilling_kernel, sizes=(64 * 128,), options={"waves_per_eu": 8})
    count, lines = run(entry)
    assert count == 1
    assert "registers spilled" in lines[-1]
    accepted = make_entry(
        spilling_kernel, sizes=(64 * 128,), options={"waves_per_eu": 8}, accepted_spills="a test"
    )
    assert run(accepted)[0] == 0


def test_entries_must_launch_what_they_name():
    entry = make_entry()
    other = dataclasses.replace(entry, kernels=("test_verify:other_kernel",))
    count, lines = run(other)
    assert count == 2
    assert any("no case launches other_kernel" in line for line in lines)
    assert any("launches scale_kernel, which no entry names" in line for line in lines)
    named = dataclasses.replace(entry, name="test.named")  # a case may launch its neighbours
    assert run(other, named)[0] == 1


def test_an_entry_without_cases_or_rows():
    count, lines = run(make_entry(sizes=()))
    assert count == 2  # no cases, and so nothing launches the kernel
    assert any("no cases" in line for line in lines)
    count, lines = run(make_entry(), archs=("gfx942",))
    assert count == 0
    assert lines[0] == "test.scale gfx942: no tuning row, not offered there"


def test_choosing_launchers_and_architectures():
    first, second = make_entry(), dataclasses.replace(make_entry(factor=9.0), name="test2.scale")
    assert run(first, second, ops=["test.scale"])[0] == 0
    assert run(first, second, ops=["test2"])[0] == 3
    absent = r"no registered launcher 'absent'; there are: test\.scale"
    with pytest.raises(ValueError, match=absent):
        run(first, ops=["absent"])
    with pytest.raises(ValueError, match="cannot emulate sm90; choose from gfx942, gfx950"):
        run(first, archs=("sm90",))


def outcome(out, reference, eager):
    return judge(Outcome(name="x", out=out, reference=reference, eager=eager))


def test_judging():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = torch.tensor([1.0, 2.001])
    assert outcome(torch.tensor([1.0, 2.0019]), exact, eager).passed
    assert not outcome(torch.tensor([1.0, 2.0021]), exact, eager).passed
    assert not outcome(torch.tensor([1.0, float("nan")]), exact, eager).passed
    assert not outcome(torch.tensor([1.0]), exact, eager).passed
    ids = torch.tensor([3, 5])
    assert outcome(ids, ids.double(), ids).passed
    assert not outcome(ids + torch.tensor([0, 1]), ids.double(), ids).passed
    assert outcome(torch.empty(0), torch.empty(0, dtype=torch.float64), torch.empty(0)).passed


TREE = """
import triton, triton.language as tl
from triton import jit

@triton.jit
def helper(x): return x + 1

@jit
def by_reference(acc_ptr):
    tl.store(acc_ptr, 1)

@triton.autotune(configs=[], key=[])
@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, n):
    by_reference(x_ptr)
    gl.warp_specialize([(handed_on, (x_ptr,))])

@gluon.jit
def handed_on(x_ptr):
    gl.store(x_ptr, 1)

@triton.jit
def stray(x_ptr):
    tl.store(x_ptr, helper(tl.load(x_ptr)))
"""


def test_scan_finds_the_kernel_no_entry_names():
    functions = jit_functions(TREE, "package.module")
    assert [f.name for f in functions] == ["helper", "by_reference", "kernel", "handed_on", "stray"]
    entry = dataclasses.replace(make_entry(), kernels=("package.module:kernel",))
    assert unregistered(functions, [entry]) == ["package.module:stray"]
    assert unregistered(functions, []) == ["package.module:kernel", "package.module:stray"]
    assert missing_kernels(functions, [make_entry()]) == ["test.scale: test_verify:scale_kernel"]


def test_every_kernel_of_the_project_is_registered():
    functions, registered = package_jit_functions(), entries()
    assert unregistered(functions, registered) == []
    assert missing_kernels(functions, registered) == []


def test_kernels_of_the_project_for_nvidia_only():
    """Their entries need no case that launches them on AMD; all others do."""
    named = {name.rpartition(":")[2] for entry in entries() for name in entry.kernels}
    found = {f.name for f in package_jit_functions() if f.nvidia_only} & named
    assert found == {
        "_hopper_grouped_kernel", "_hopper_prefill_kernel", "_hopper_verify_kernel",
        "_hopper_window_kernel", "_router_hopper_kernel", "_window_merge_kernel",
    }  # fmt: skip


def test_verify_fails_for_an_unregistered_kernel(monkeypatch):
    stray = jit_functions(TREE, "package.module")
    monkeypatch.setattr("inkling_rocm.verify.run.package_jit_functions", lambda: stray)
    lines = []
    assert verify(("gfx950",), launchers=[], say=lines.append) == 2
    assert "FAILED package.module:stray: a kernel no register entry names" in lines


@pytest.mark.parametrize(("factor", "code"), [(3.0, 0), (4.0, 1)])
def test_command_line(monkeypatch, tmp_path, factor, code):
    app = Typer()
    app.command()(command)
    monkeypatch.setattr("inkling_rocm.verify.run.entries", lambda: (make_entry(factor=factor),))
    monkeypatch.setattr("inkling_rocm.verify.run.package_jit_functions", list)
    arguments = ["--arch", "gfx950", "--json", str(tmp_path / "report.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert (tmp_path / "report.json").exists()
    assert CliRunner().invoke(app, ["--arch", "gfx90a"]).exit_code == 2


GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

@gluon.jit
def nvidia_kernel(x_ptr):
    tma.store_wait(0)
"""


WAITS = """
from triton.language.extra.cuda import gdc_wait

@triton.jit
def always(x_ptr):
    gdc_wait()
    tl.store(x_ptr, 1)

@triton.jit
def sometimes(x_ptr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    tl.store(x_ptr, 1)
"""


def test_an_nvidia_instruction_behind_no_condition():
    functions = jit_functions(WAITS, "package.module")
    assert {f.name: f.nvidia_only for f in functions} == {"always": True, "sometimes": False}


def test_kernels_for_nvidia_only_are_left_out_and_named(monkeypatch, tmp_path):
    assert not any(f.nvidia_only for f in jit_functions(TREE, "package.module"))
    functions = jit_functions(GLUON, "package.gluon")
    assert [f.nvidia_only for f in functions] == [True]
    entry = make_entry()
    entry = dataclasses.replace(entry, kernels=(*entry.kernels, "package.gluon:nvidia_kernel"))
    assert run(entry)[0] == 1
    monkeypatch.setattr("inkling_rocm.verify.run.package_jit_functions", lambda: functions)
    report = tmp_path / "report.md"
    assert verify(("gfx950",), markdown_path=report, launchers=[entry], say=lambda line: None) == 0
    assert "NVIDIA GPUs only: `package.gluon:nvidia_kernel`." in report.read_text()


def test_scalar_registers_in_lanes_are_reported_and_no_spill():
    static = StaticInfo(8, 0, 100, 0, 3, 0, 0, 8, Counter())
    counters = Counters("gfx950")
    counters.instructions.update({"v_writelane_b32": 2, "v_readlane_b32": 1, "v_add_u32_e32": 9})
    [report] = kernel_reports("gfx950", [LaunchRecord("k", (1,), static, counters, None)])
    assert (report.spills, report.lane_spills, report.lane_spill_share) == (0, 3, 0.25)
