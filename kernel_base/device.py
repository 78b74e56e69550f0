"""Triton helpers about order and memory that more than one package's kernels use."""

import triton
import triton.language as tl


@triton.jit
def drain_stores(lanes, AMD: tl.constexpr):
    """Each wave waits for its own global stores; `lanes` is any small int32 tensor.

    A barrier on AMD waits for LDS only: without this, a ticket that one wave draws could be seen
    before another wave's partial results (the emulator's store order shows it). NVIDIA's barrier
    orders them already.
    """
    if AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, $1",
            "=v,v",
            [lanes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def arrive(count_ptr, lanes, AMD: tl.constexpr):
    """Count this program at count_ptr, after its stores: who sees the count may load them past its
    own L1 (".cg"). Returns how many had arrived before. `lanes` is any small int32 tensor."""
    drain_stores(lanes, AMD)
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_arrivals(count_ptr, wanted):
    """Wait until `wanted` programs of this launch have arrived at count_ptr (or some that waited
    departed).

    Only for programs behind those they wait for: hardware starts programs in the order of their
    numbers, so whoever is awaited has started and, waiting for nobody, ends. The emulator runs
    programs in that order, one after the other. Not for AMD with Triton before 3.8: its compiler
    puts the loop's barriers into divergent control flow (the emulator refuses the code).
    """
    count = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
    while (count >= 0) & (count < wanted):
        count = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def depart(count_ptr, first, arrived, waited):
    """After await_arrivals of `arrived` programs, in each of `waited` that wait there, one of which
    is the `first`: the last of them leaves zero at count_ptr, and none has to know that it is.

    The first takes off what all others add. Until all have departed the count is at least `arrived`
    without the first, and negative after it.
    """
    tl.atomic_add(count_ptr, tl.where(first, 1 - arrived - waited, 1), sem="relaxed", scope="gpu")


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):
    """In a launch that may start before the previous one has ended (option launch_pdl, NVIDIA):
    wait for its end and its stores. What comes before may touch nothing that an earlier launch
    writes."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Allow the next launch, if it has launch_pdl, to start once every program was here."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
