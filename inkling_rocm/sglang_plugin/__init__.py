"""Inkling inside SGLang: our model, attention and ring state behind SGLang's own launch line.

Imports nothing: `entry.py` is what SGLang loads, and it must be able to say why the rest failed.
"""
