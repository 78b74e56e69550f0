"""Reuse of computed prefixes, and the tiers that hold what no longer fits into the pools."""
