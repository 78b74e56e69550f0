"""Which releases of Triton compile programs that wait for others of their launch for AMD."""

import pytest
import triton

before_3_8 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
# For parameters and tests that emulate such programs.
emulated_waits = pytest.mark.skipif(
    before_3_8,
    reason="Triton before 3.8 puts the barriers of kernel_base.device.await_arrivals into "
    "divergent control flow for AMD, which the emulator refuses; no AMD row asks for waits",
)
