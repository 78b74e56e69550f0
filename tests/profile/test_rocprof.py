"""The parser of rocprofv3's CSV traces, on samples in the documented formats of its releases."""

from __future__ import annotations

import json

import pytest

from inkling_rocm.profile import rocprof
from inkling_rocm.profile.run import from_rocprof
from inkling_rocm.profile.table import OpRow, op_of_kernel

# ROCm 7: dispatches have streams and threads; agents are named.
KERNELS_7 = """\
"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name",\
"Correlation_Id","Start_Timestamp","End_Timestamp","LDS_Block_Size","Scratch_Size","VGPR_Count",\
"Accum_VGPR_Count","SGPR_Count","Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z",\
"Grid_Size_X","Grid_Size_Y","Grid_Size_Z"
"KERNEL_DISPATCH","Agent 4",1,1,70,2,11,"_decode_kernel",12,2000,7000,0,0,104,0,64,256,1,1,512,1,1
"KERNEL_DISPATCH","Agent 4",1,1,70,1,10,"_router_kernel",11,1000,1500,0,0,58,0,64,256,1,1,256,1,1
"KERNEL_DISPATCH","Agent 4",1,1,70,3,12,"void at::native::elementwise_kernel<128, 4>(int, float)",\
13,8000,8250,0,0,8,0,16,64,1,1,1024,1,1
"KERNEL_DISPATCH","Agent 4",1,1,70,4,13,"Cijk_Ailk_Bljk_BBS_BH_MT128x64",14,9000,12000,0,0,256,\
0,96,256,1,1,1024,1,1
"KERNEL_DISPATCH","Agent 4",1,1,70,5,13,"Cijk_Ailk_Bljk_BBS_BH_MT128x64",99,20000,21000,0,0,256,\
0,96,256,1,1,1024,1,1
"""
# ROCm 6.2: no stream, no thread, other resource columns, agents by number.
KERNELS_62 = """\
"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp",\
"End_Timestamp","Private_Segment_Size","Group_Segment_Size","Workgroup_Size_X","Workgroup_Size_Y",\
"Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"
"KERNEL_DISPATCH",1,139690710949888,15,"matrixTranspose(float*, float*, int)",0,671599758568,\
671599825328,0,0,4,4,1,1024,1024,1
"""
CALLS = """\
"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp","End_Timestamp"
"HIP_RUNTIME_API","hipModuleLaunchKernel",70,70,11,510,520
"HIP_RUNTIME_API","hipModuleLaunchKernel",70,70,12,610,620
"HIP_RUNTIME_API","hipLaunchKernel",70,70,13,640,650
"HIP_RUNTIME_API","hipExtModuleLaunchKernel",70,71,14,615,630
"HIP_RUNTIME_API","hipModuleLaunchKernel",70,70,99,910,920
"""
MARKERS = """\
"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp","End_Timestamp"
"MARKER_CORE_API","op:gate",70,70,21,500,530
"MARKER_CORE_API","op:rel_attention",70,70,22,600,660
"MARKER_CORE_API","inkling window",70,70,20,400,900
"""


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "host"
    folder.mkdir()
    for name, text in (("kernel", KERNELS_7), ("hip_api", CALLS), ("marker_api", MARKERS)):
        (folder / f"inkling_{name}_trace.csv").write_text(text)
    return tmp_path


def by_op(rows):
    return {row.op: (row.launches, row.us) for row in rows}


def test_kernels_belong_to_the_range_their_launch_lies_in(traces):
    """The launch at 615 is another thread's; the one at 910 lies outside the window."""
    assert by_op(rocprof.read_traces(traces)) == {
        "gate": (1, 0.5),
        "rel_attention": (2, 5.25),
        "library: matrix product": (1, 3.0),
    }


def test_without_ranges_the_kernels_name_decides(traces):
    for path in traces.rglob("*marker*"):
        path.unlink()
    assert by_op(rocprof.read_traces(traces)) == {
        "moe_aiter.router": (1, 0.5),
        "triton_attn.attention_decode": (1, 5.0),
        "library: other": (1, 0.25),
        "library: matrix product": (2, 4.0),
    }


def test_older_columns(tmp_path):
    (tmp_path / "199_kernel_trace.csv").write_text(KERNELS_62)
    (kernel,) = rocprof.read_kernels(tmp_path / "199_kernel_trace.csv")
    assert kernel == rocprof.Kernel(
        "matrixTranspose(float*, float*, int)", 0, 671599758568, 671599825328
    )
    assert by_op(rocprof.read_traces(tmp_path)) == {"library: other": (1, 66.76)}


def test_rows_of_other_kinds_are_no_dispatches(tmp_path):
    path = tmp_path / "x_kernel_trace.csv"
    path.write_text(KERNELS_62.replace("KERNEL_DISPATCH", "SCRATCH_MEMORY_ALLOC"))
    assert rocprof.read_kernels(path) == []


def test_what_is_no_trace_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no kernel_trace\.csv"):
        rocprof.read_traces(tmp_path)
    path = tmp_path / "x_kernel_trace.csv"
    path.write_text(KERNELS_62.replace("Start_Timestamp", "Begin"))
    with pytest.raises(ValueError, match="no column Start_Timestamp"):
        rocprof.read_traces(tmp_path)
    path.write_text("")
    with pytest.raises(ValueError, match="it has none"):
        rocprof.read_traces(tmp_path)


def test_the_command_line(tmp_path):
    line = rocprof.command(tmp_path, ["prog", "--x"])
    assert line[0] == "rocprofv3"
    assert line[-3:] == ["--", "prog", "--x"]
    assert {"--kernel-trace", "--marker-trace", "--hip-runtime-trace"} < set(line)
    assert line[line.index("--output-format") + 1] == "csv"


def test_traces_and_the_programs_facts_make_one_table(traces):
    facts = traces / "facts.json"
    facts.write_text(
        json.dumps(
            {
                "steps": 2, "wall_us": 100.0, "profiler": "rocprofv3", "device": "MI300X",
                "bytes_per_s": 6e12, "ceiling": "the datasheet's, gfx942",
                "rows": [
                    {"op": "gate", "calls": 4, "launches": 0, "us": 0.0, "bytes": 1_500_000,
                     "fraction": None}
                ],
            }
        )
    )  # fmt: skip
    found = from_rocprof(traces, facts)
    gate = next(row for row in found.rows if row.op == "gate")
    assert gate == OpRow(op="gate", calls=4, launches=1, us=0.5, bytes=1_500_000)
    assert gate.fraction(6e12) == pytest.approx(0.5)
    assert "MI300X, rocprofv3: 2 steps" in found.as_text()
    assert " 50%" in found.as_text()


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_merge_kernel", "triton_attn.attention_decode"),
        ("_select_kernel.kd", "moe_aiter.select"),
        ("nvjet_tst_64x8_64x16_4x2_h_bz_TNT", "library: matrix product"),
        ("void at::native::reduce_kernel<512>(x)", "library: other"),
    ],
)
def test_kernel_names(name, op):
    assert op_of_kernel(name) == op
