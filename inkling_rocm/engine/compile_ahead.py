"""Kernels compiled side by side before their first launches.

Triton compiles a kernel when it is launched for the first time, and the launching thread waits: an
engine's start on a machine that has never run the model's shapes is mostly that, a kernel at a
time. `compiling_ahead` goes through the same calls without launching, and has the kernels compiled
in threads (the compiler's passes and the assembler do not hold Python's lock).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from inkling_rocm.ops.registry import OpSet

# Parsing holds Python's lock for a quarter of a kernel's time, so more threads find nothing to do.
MOST_THREADS = 8
# Ops that read what others wrote and would do so from memory that nothing has written.
COMPUTED_FROM = (
    "embed", "attention_prologue", "rel_attention", "residual_conv_norm", "gate", "experts",
    "lm_head",
)  # fmt: skip
_one_at_a_time = threading.Lock()
# Python before 3.11.8 takes threads that parse at one time for an error of its own ("AST
# constructor recursion depth mismatch").
_parsing = threading.Lock()


def may_compile_ahead(ops: OpSet) -> bool:
    """Whether every op that follows indices on the device is Triton's. Others would really run, on
    indices that no kernel has written."""
    return all(c.variant == "triton" for c in ops.choices if c.op in COMPUTED_FROM)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and what passes a kernel its arguments: some versions of Triton
    have a C compiler make that at the first launch."""

    def submit(self, compile_kernel: Callable, /, *args: Any, **kwargs: Any) -> Future:
        from triton.runtime import driver

        def work() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(work)


@contextmanager
def compiling_ahead(*, progress: bool = True) -> Iterator[None]:
    """Triton launches of this thread start nothing inside the block; it ends when all their kernels
    are compiled. What they would have written is not: the block's tensors hold anything.

    Raises: whatever compiling a kernel raises.
    """
    from triton import AsyncCompileMode
    from triton.runtime._async_compile import active_mode
    from triton.runtime.jit import JITFunction

    owner, threads = threading.get_ident(), min(MOST_THREADS, os.cpu_count() or 1)
    with _one_at_a_time, _Compilers(threads) as pool:
        launch = JITFunction.run  # only now: before its turn it could be another thread's `run`

        def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            # Other threads, an engine's that is running say, launch as ever.
            only_compile = warmup or threading.get_ident() == owner
            return launch(self, *args, grid=grid, warmup=only_compile, **kwargs)

        parser: Any = next(c for c in JITFunction.__mro__ if "parse" in vars(c))
        parse = parser.parse

        def parse_alone(self: JITFunction) -> Any:
            with _parsing:
                return parse(self)

        JITFunction.run, parser.parse = run, parse_alone
        try:
            with AsyncCompileMode(pool) as mode:
                yield
                kernels = mode.raw_futures
                if kernels:
                    done = tqdm(
                        as_completed(kernels),
                        desc="compiling kernels",
                        total=len(kernels),
                        unit="kernel",
                        disable=not progress,
                    )
                    for _ in done:
                        pass
        finally:
            JITFunction.run, parser.parse = launch, parse
            active_mode.set(None)  # Triton 3.6 leaves it where a kernel has not compiled
