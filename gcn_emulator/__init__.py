"""gfx942/gfx950 code, executed instruction by instruction on a CPU."""
