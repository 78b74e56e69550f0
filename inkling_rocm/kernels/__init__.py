"""Triton kernels that are Inkling's own: what a layer does beside its matrix products and
attention."""
