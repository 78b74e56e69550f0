"""Speculative decoding in the embedded engine."""
