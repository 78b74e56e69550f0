"""Rows of the whole engine (`inkling-rocm bench`, bench.engine_gpu) and their tables."""
