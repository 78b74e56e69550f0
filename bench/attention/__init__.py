"""Benchmarks of triton_attn against SGLang's Triton kernels in the same process."""
