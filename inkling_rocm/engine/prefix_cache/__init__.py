"""Reuse of what earlier sequences have computed of a prompt; see docs/prefix_cache.md."""
