"""Kernels belong to the op whose range holds their launch, whoever launched them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from inkling_rocm.profile.torch_trace import op_rows


@dataclass
class Event:
    """The fields of torch's FunctionEvent that are read."""

    name: str
    start: float
    end: float
    id: int = 0
    device: str = "CPU"
    is_user_annotation: bool = False
    cpu_children: list = field(default_factory=list)

    @property
    def time_range(self):
        span = SimpleNamespace(start=self.start, end=self.end)
        span.elapsed_us = lambda: self.end - self.start
        return span

    @property
    def device_type(self):
        return SimpleNamespace(name=self.device)


def kernel(name, number, start, us):
    return Event(name, start, start + us, id=number, device="CUDA")


def test_kernels_of_torch_and_of_triton():
    events = [
        Event("op:linear", 0, 10),
        Event("op:gate", 20, 30),
        Event("aten::mm", 1, 9, id=1),
        Event("cudaLaunchKernel", 2, 3, id=101),
        Event("cuLaunchKernelEx", 21, 22, id=102),  # Triton
        Event("cudaMemcpyAsync", 40, 41, id=103),
        kernel("nvjet_tst", 101, 100, 4.0),
        kernel("_gate_kernel", 102, 104, 3.0),  # long after its launch
        kernel("Memcpy DtoH", 103, 107, 1.0),
        kernel("op:gate", 0, 104, 3.0),
    ]
    events[-1].is_user_annotation = True
    rows = {row.op: row for row in op_rows(events, on_device=True)}
    assert (rows["linear"].launches, rows["linear"].us) == (1, 4.0)
    assert (rows["gate"].launches, rows["gate"].us) == (1, 3.0)
    assert (rows["library: other"].launches, rows["library: other"].us) == (1, 1.0)


def test_without_launch_calls_the_kernels_time_decides():
    events = [
        Event("op:linear", 0, 10),
        Event("op:gate", 20, 30),
        kernel("a", 1, 5, 2.0),
        kernel("b", 2, 25, 3.0),
        kernel("library", 3, 15, 1.0),
    ]
    rows = {row.op: row.us for row in op_rows(events, on_device=True)}
    assert rows == {"linear": 2.0, "gate": 3.0, "library: other": 1.0}
