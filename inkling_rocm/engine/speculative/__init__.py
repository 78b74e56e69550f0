"""Speculation: a drafter proposes tokens, the model computes them in one forward, and those are
accepted that leave the output as it would have been. See docs/speculation.md."""
