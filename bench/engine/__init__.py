"""Rows of the whole engine (`inkling-rocm bench layer|serving`, bench.engine_gpu) and their tables."""
