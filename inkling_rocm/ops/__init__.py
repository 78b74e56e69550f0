"""The op interface: contracts, torch references, variants and their choice."""
