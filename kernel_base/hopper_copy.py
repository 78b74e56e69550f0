"""Hopper's asynchronous copies for Gluon kernels, by one name each: Triton renamed them after 3.6
(the old names are still there, and raise). And the barriers that say when a ring's stages are full
or free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Tiles of a tensor descriptor, to and from shared memory; rows by their addresses.
bulk_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
bulk_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
row_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.jit
def rings(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Rings of barriers, one a stage: a ring for each of ARRIVALS, so many turn its barriers."""
    barriers = ()
    for _ in gl.static_range(len(ARRIVALS)):
        ring = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        barriers = barriers + (ring,)  # type: ignore[assignment]  # noqa: RUF005
    for stage in gl.static_range(STAGES):
        for i in gl.static_range(len(ARRIVALS)):
            mbarrier.init(barriers[i].index(stage), count=ARRIVALS[i])
    return barriers
