"""Benchmarks of moe_aiter against SGLang's Inkling expert kernels in the same process."""
