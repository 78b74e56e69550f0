"""Paged Triton attention with a compile-time inlined score_mod, for any model."""
