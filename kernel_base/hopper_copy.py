"""Hopper's asynchronous copies for Gluon kernels, by one name each: Triton renamed them after 3.6
(the old names are still there, and raise)."""

from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# Tiles of a tensor descriptor, to and from shared memory; rows by their addresses.
bulk_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
bulk_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
row_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
