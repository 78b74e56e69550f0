"""Inkling for AMD Instinct first: model, ops, engine, server."""
